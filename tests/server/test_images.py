"""Images of conversations: PNG files, and answers of a fleet with encode workers."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

from anydecode import LLM
from anydecode.cluster.proxy import FleetLLM
from anydecode.errors import InvalidRequestError
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.media import Media
from anydecode.server.errors import ApiError
from anydecode.server.images import ConversationImages, read_images, read_png
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
from waiting import wait_for
from worker_threads import SECRET, start_worker

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # colour type by number of channels


def filtered(pixels: np.ndarray, kinds: list[int]) -> bytes:
    """The lines of an image `[height, width, channels]`, filtered as the PNG specification says."""
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, -1).astype(int)
    lines = []
    for row in range(height):
        kind, line = kinds[row % len(kinds)], [kinds[row % len(kinds)]]
        for column in range(width * channels):
            a = flat[row, column - channels] if column >= channels else 0
            b = flat[row - 1, column] if row else 0
            c = flat[row - 1, column - channels] if row and column >= channels else 0
            p = a + b - c
            paeth = a
            if abs(p - a) > min(abs(p - b), abs(p - c)):
                paeth = b if abs(p - b) <= abs(p - c) else c
            guess = (0, a, b, (a + b) // 2, paeth, 0)[kind]  # there is no kind 5
            line.append(int(flat[row, column] - guess) % 256)
        lines.append(bytes(line))
    return b"".join(lines)


def png(
    pixels: np.ndarray,
    kinds: list[int] | None = None,
    *,
    palette: bytes | None = None,
    depth: int = 8,
    interlacing: int = 0,
    width: int | None = None,
) -> bytes:
    height, own_width, channels = pixels.shape
    colour = 3 if palette is not None else COLOURS[channels]
    header = struct.pack(">IIBBBBB", width or own_width, height, depth, colour, 0, 0, interlacing)
    content = zlib.compress(filtered(pixels, kinds or [0]))
    half = len(content) // 2
    parts = [(b"IHDR", header), (b"PLTE", palette)] if palette is not None else [(b"IHDR", header)]
    parts += [(b"IDAT", content[:half]), (b"IDAT", content[half:]), (b"IEND", b"")]
    found = b"\x89PNG\r\n\x1a\n"
    for name, part in parts:
        check = struct.pack(">I", zlib.crc32(name + part))
        found += struct.pack(">I", len(part)) + name + part + check
    return found


def image(seed: int, channels: int = 3, height: int = 16, width: int = 24) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("kinds", [[0], [1], [2], [3], [4], [4, 1, 3, 2, 0]], ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pixels_are_those_of_the_file(kinds: list[int], channels: int) -> None:
    pixels = image(1, channels)
    expected = pixels[:, :, :3] if channels > 2 else np.repeat(pixels[:, :, :1], 3, 2)
    assert np.array_equal(read_png(png(pixels, kinds)), expected)


def test_a_palette_gives_the_colours() -> None:
    pixels, colours = image(2, 1) % 7, image(3, 3, 1, 7)
    found = read_png(png(pixels, palette=colours.tobytes()))
    assert np.array_equal(found, colours[0][pixels[:, :, 0]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no PNG file"),
        (b"GIF89a", "no PNG file"),
        (png(image(1))[:-40], "no PNG file"),
        (png(image(1)).replace(b"IDAT", b"IDAX"), "no PNG file"),
        (png(image(1), [5]), "no PNG file"),
        (png(image(1), depth=16), "16 bits per channel"),
        (png(image(1), interlacing=1), "interlaced"),
        (png(image(1, 3, 1, 24), width=1 << 19), "524288 x 1 pixels"),
        (png(image(1, 1), palette=bytes(6)), "no PNG file"),
    ],
    ids=[
        "empty",
        "gif",
        "cut",
        "changed",
        "filter",
        "16 bits",
        "interlaced",
        "wide",
        "short palette",
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_png(data)


def test_no_more_is_unpacked_than_the_image_has() -> None:
    """A file of a few kilobytes with 64 megabytes of zeros."""
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(64 << 20)))):
        check = struct.pack(">I", zlib.crc32(name + part))
        found += struct.pack(">I", len(part)) + name + part + check
    assert read_png(found).shape == (8, 8, 3)


def part(pixels: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(png(pixels, [4])).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_a_template_has_to_keep_the_images_in_order() -> None:
    images = ConversationImages(PatchEncoder(8))
    first, second = (images.mark(part(image(seed)), "messages") for seed in range(2))
    assert images.split(f"a{first}b{second}c") == ["a", "b", "c"]
    pixels = read_images(None, images.files)
    tokens, placed = images.place([[1], [2, 3], [4]], pixels, placeholder=0)
    assert tokens == [1, *[0] * 6, 2, 3, *[0] * 6, 4]
    assert [one.first for one in placed] == [1, 9]
    assert np.array_equal(placed[1].pixels, image(1))
    for text in (f"{second}{first}", first, f"{first}{second}{first}", f"{first}{first}{second}"):
        with pytest.raises(ApiError, match="in order"):
            images.split(text)


@pytest.mark.slow
def test_images_of_a_chat_reach_the_encode_workers() -> None:
    pictures = [image(1, 3, 32, 32), image(2, 3, 16, 16)]
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see "},
                    part(pictures[0]),
                    {"type": "text", "text": " and "},
                    part(pictures[1]),
                ],
            }
        ],
        "max_tokens": 12,
        "temperature": 0,
    }
    options = {**OPTIONS, "tokenizer": ByteTokenizer()}  # which has a chat template
    with FleetLLM(MODEL, SECRET, **options) as fleet:
        threads = [
            start_worker(LLM(MODEL, **options), fleet.fleet_port, name=role, role=role)[1]
            for role in ("encode", "mixed")
        ]
        wait_for(lambda: len(fleet.status()["workers"]) == 2)
        settings = Settings(name="m", port=0, accepts_images=True)
        with LiveServer(fleet, settings) as server:
            url = f"{server.url}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=60).json()
            assert "anydecode" in answer, answer
            assert "ignored" not in answer["anydecode"]
            assert fleet.status()["counts"]["encodings"] == 2
            template = fleet.tokenizer.render_chat
            rendered = template([{"role": "user", "content": "see \x01 and \x02"}])
            before, _, rest = rendered.partition("\x01")
            between, _, after = rest.partition("\x02")
            pieces = [
                fleet.tokenizer.encode(one, special=False) for one in (before, between, after)
            ]
            prompt = [*pieces[0], *[0] * 16, *pieces[1], *[0] * 4, *pieces[2]]
            places = len(pieces[0]), len(pieces[0]) + 16 + len(pieces[1])
            media = [Media(*one) for one in zip(places, pictures, strict=True)]
            expected = fleet.generate(prompt, prompt_embeds=media, max_tokens=12, temperature=0)
            assert answer["choices"][0]["message"]["content"] == expected.text
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            for url_of_image, message in (
                ("http://example.org/a.png", "none is fetched"),
                ("data:image/png;base64,AA%", "not base64"),
                ("data:image/png;base64,AAAA", "no PNG file"),
            ):
                bad = {"type": "image_url", "image_url": {"url": url_of_image}}
                messages = [{"role": "user", "content": [bad]}]
                refused = httpx.post(url, json={**body, "messages": messages})
                assert refused.status_code == 400
                assert message in refused.json()["error"]["message"]
        with LiveServer(fleet, Settings(name="m", port=0)) as server:
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]
        fleet.close()
        for thread in threads:
            thread.join(30)

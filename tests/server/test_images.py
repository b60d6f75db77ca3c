"""Images of conversations: files, and answers of a fleet with encode workers."""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("PIL")

import httpx
from PIL import Image

from anydecode import LLM
from anydecode.cluster.proxy import FleetLLM
from anydecode.errors import InvalidRequestError
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.media import Media
from anydecode.server.errors import ApiError
from anydecode.server.images import ConversationImages, read_image, read_images
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings
from waiting import wait_for
from worker_threads import SECRET, start_worker

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    found = BytesIO()
    image.save(found, kind, **options)
    return found.getvalue()


def image(seed: int, channels: int = 3, height: int = 16, width: int = 24) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, channels), np.uint8)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file whose header has this size, whatever its pixels."""
    data = file_of(Image.new("1", (8, 8)))
    header = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_pixels_are_those_of_the_file(mode: str, kind: str, options: dict[str, Any]) -> None:
    pixels = image(1, len(mode))
    if "A" in mode:
        pixels[:, :, -1] |= 1  # WebP drops the colour of what is invisible
    expected = pixels[:, :, :3] if "RGB" in mode else np.repeat(pixels[:, :, :1], 3, 2)
    file = file_of(Image.fromarray(pixels.squeeze(), mode), kind, **options)
    assert np.array_equal(read_image(file), expected)


def test_a_palette_gives_the_colours() -> None:
    pixels, colours = image(2, 1)[:, :, 0] % 7, image(3, 3, 1, 7)
    picture = Image.fromarray(pixels, "P")
    picture.putpalette(colours.tobytes())
    assert np.array_equal(read_image(file_of(picture)), colours[0][pixels])


def test_photographs_are_close_to_their_pixels_and_upright() -> None:
    rows, columns = np.mgrid[:16, :24].astype(np.uint8)
    pixels = np.stack([10 * rows, 10 * columns, 5 * (rows + columns)], 2)
    turned = Image.Exif()
    turned[274] = 6  # the orientation: the first row is the right side
    data = file_of(Image.fromarray(pixels), "JPEG", quality=95, subsampling=0, exif=turned)
    found = read_image(data)
    assert found.shape == (24, 16, 3)
    assert np.abs(found.astype(int) - np.rot90(pixels, -1)).max() < 12


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no PNG, JPEG or WebP file"),
        (file_of(Image.new("RGB", (8, 8)), "GIF"), "no PNG, JPEG or WebP file"),
        (file_of(Image.fromarray(image(1)))[:-40], "is damaged"),
        (file_of(Image.fromarray(image(1))).replace(b"IDAT", b"IDAX"), "is damaged"),
        (file_of(Image.fromarray(image(1)), "JPEG")[:400], "is damaged"),
        (file_of(Image.new("I;16", (8, 8))), "more than 8 bits per channel"),
        (png_of_size(1 << 19, 1), "524288 x 1 pixels"),
        (png_of_size(20000, 20000), "more than 262144 pixels"),
    ],
    ids=["empty", "gif", "cut", "changed", "cut photograph", "16 bits", "wide", "bomb"],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_image(data)


def test_without_pillow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'anydecode\[images\]'"):
        read_image(b"")


def part(pixels: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(file_of(Image.fromarray(pixels))).decode()
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
                ("data:image/png;base64,AAAA", "no PNG, JPEG or WebP file"),
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

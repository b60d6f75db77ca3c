"""Images in conversations: PNG files in data URLs, which encode workers of a fleet encode."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.scoring.media import Encoder, Media
from anydecode.server.errors import ApiError

_PREFIX = "data:image/png;base64,"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Channels by the colour type of a PNG file: grey, colour, a palette, grey or colour with opacity.
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: Maximum number of pixels of an image.
MAX_PIXELS = 1 << 18


class ConversationImages:
    """The images of one conversation, in order, and marks that stand for them in its text.

    Args:
        encoder: The encoder of the fleet.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._files: dict[str, bytes] = {}

    @property
    def files(self) -> list[bytes]:
        """The images, as PNG files."""
        return list(self._files.values())

    def mark(self, part: dict[str, Any], param: str) -> str:
        """Add the image of a content part. Returns its mark, which occurs in no other text.

        Args:
            part: `{"type": "image_url", "image_url": {"url": ...}}`.
            param: The field of the request that has the part.

        Raises:
            ApiError: It has no data URL of a PNG file.
        """
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str) or not url.startswith(_PREFIX):
            reason = f"an image_url needs a url that begins with {_PREFIX}; none is fetched"
            raise ApiError(400, reason, param=param)
        mark = uuid4().hex
        try:
            self._files[mark] = base64.b64decode(url[len(_PREFIX) :], validate=True)
        except binascii.Error:
            raise ApiError(400, "the data of an image is not base64", param=param) from None
        return mark

    def split(self, text: str) -> list[str]:
        """The texts before, between and behind the images of a prompt.

        Raises:
            ApiError: The chat template leaves an image out, repeats or moves one.
        """
        texts = []
        for mark in self._files:
            before, found, text = text.partition(mark)
            texts.append(before)
            if not found or any(one in before or mark in text for one in self._files):
                reason = "the chat template does not keep the images of a conversation in order"
                raise ApiError(400, reason, param="messages")
        return [*texts, text]

    def place(
        self, pieces: Sequence[list[int]], pixels: Sequence[np.ndarray], placeholder: int
    ) -> tuple[list[int], list[Media]]:
        """The token ids of a prompt with placeholders for its images, and the images.

        Args:
            pieces: The token ids of the texts of `split`.
            pixels: The pixels of `files`.
            placeholder: The token in the place of each embedding.

        Raises:
            InvalidRequestError: The encoder does not take an image of this size.
        """
        tokens, placed = list(pieces[0]), []
        for piece, image in zip(pieces[1:], pixels, strict=True):
            placed.append(Media(len(tokens), image))
            tokens += [placeholder] * self._encoder.num_rows(image) + piece
        return tokens, placed


def read_images(tokenizer: object, files: Sequence[bytes]) -> list[np.ndarray]:
    """`read_png` of several files, in a worker process, whose functions get the tokenizer."""
    return [read_png(one) for one in files]


def read_png(data: bytes) -> np.ndarray:
    """The pixels of a PNG file, uint8 `[height, width, 3]`; transparency is ignored.

    Raises:
        InvalidRequestError: It is no PNG file, is interlaced, has not 8 bits per channel, or more
            than `MAX_PIXELS` pixels.
    """
    try:
        chunks = _chunks(data)
        width, height, depth, colour, _, _, interlacing = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
        if depth != 8 or interlacing or not 0 < width * height <= MAX_PIXELS:
            raise InvalidRequestError(
                f"a PNG file has {width} x {height} pixels of {depth} bits per channel"
                f"{', interlaced' * bool(interlacing)}; allowed are 8 bits, not interlaced, and up"
                f" to {MAX_PIXELS} pixels"
            )
        channels = _CHANNELS[colour]
        size = height * (1 + width * channels)
        lines = zlib.decompressobj().decompress(chunks[b"IDAT"], size)
        rows = np.frombuffer(lines, np.uint8).reshape(height, 1 + width * channels)
        pixels = _unfiltered(rows, channels).reshape(height, width, channels)
        if colour == 3:
            palette = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
            colours: np.ndarray = palette[pixels[:, :, 0]]
            return colours
    except InvalidRequestError:  # which is a ValueError
        raise
    except (KeyError, IndexError, ValueError, struct.error, zlib.error):
        raise InvalidRequestError("the data of an image is no PNG file, or is damaged") from None
    return np.repeat(pixels[:, :, :1], 3, 2) if channels < 3 else pixels[:, :, :3].copy()


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """The chunks of a PNG file by name; those of the same name are joined."""
    if data[:8] != _SIGNATURE:
        raise ValueError
    found: dict[bytes, bytes] = {}
    start = 8
    while start < len(data):
        (length,) = struct.unpack_from(">I", data, start)
        name, content = data[start + 4 : start + 8], data[start + 8 : start + 8 + length]
        (check,) = struct.unpack_from(">I", data, start + 8 + length)
        if zlib.crc32(name + content) != check:
            raise ValueError
        found[name] = found.get(name, b"") + content
        start += 12 + length
    return found


def _unfiltered(rows: np.ndarray, channels: int) -> np.ndarray:
    """Lines of a PNG file, of which each has its filter first (PNG specification, chapter 9)."""
    before = np.zeros(rows.shape[1] - 1, np.uint8)
    result = np.empty((len(rows), rows.shape[1] - 1), np.uint8)
    for number, (kind, *_) in enumerate(rows[:, :1]):
        line = rows[number, 1:]
        if kind == 0:
            done = line
        elif kind == 1:
            done = np.cumsum(line.reshape(-1, channels), 0, dtype=np.uint8).reshape(-1)
        elif kind == 2:
            done = line + before
        elif kind in (3, 4):
            done = _predicted(line, before, channels, has_paeth=kind == 4)
        else:
            raise ValueError
        result[number] = before = done
    return result


def _predicted(
    line: np.ndarray, above: np.ndarray, channels: int, *, has_paeth: bool
) -> np.ndarray:
    """A line whose bytes are differences from the mean of the left and the upper one, or from the
    one of three that Paeth's predictor chooses."""
    done = [0] * channels + line.tolist()
    upper = [0] * channels + above.tolist()
    for index in range(channels, len(done)):
        left, up, corner = done[index - channels], upper[index], upper[index - channels]
        guess = (left + up) // 2
        if has_paeth:
            estimate = left + up - corner
            guess = min((left, up, corner), key=lambda one: abs(estimate - one))
        done[index] = (done[index] + guess) & 255
    return np.array(done[channels:], np.uint8)

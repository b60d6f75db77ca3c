"""Images in conversations: files in data URLs, which encode workers of a fleet encode."""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any
from uuid import uuid4

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.scoring.media import Encoder, Media
from anydecode.server.errors import ApiError

_FORMATS = ("PNG", "JPEG", "WEBP")
_PREFIX = re.compile(r"data:image/(?:png|jpeg|webp);base64,")
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
        """The images, as files."""
        return list(self._files.values())

    def mark(self, part: dict[str, Any], param: str) -> str:
        """Add the image of a content part. Returns its mark, which occurs in no other text.

        Args:
            part: `{"type": "image_url", "image_url": {"url": ...}}`.
            param: The field of the request that has the part.

        Raises:
            ApiError: It has no data URL of an image.
        """
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        prefix = _PREFIX.match(url) if isinstance(url, str) else None
        if not isinstance(url, str) or prefix is None:
            reason = (
                "an image_url needs a url that begins with data:image/png;base64, (or jpeg or webp"
                " in place of png); none is fetched"
            )
            raise ApiError(400, reason, param=param)
        mark = uuid4().hex
        try:
            self._files[mark] = base64.b64decode(url[prefix.end() :], validate=True)
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
    """`read_image` of several files, in a worker process, whose functions get the tokenizer."""
    return [read_image(one) for one in files]


def read_image(data: bytes) -> np.ndarray:
    """The pixels of an image file, uint8 `[height, width, 3]`, upright; transparency is ignored.

    Raises:
        InvalidRequestError: It is no PNG, JPEG or WebP file, is damaged, has more than 8 bits per
            channel, or more than `MAX_PIXELS` pixels; or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise InvalidRequestError(
            "images need Pillow, which the server does not have: pip install 'anydecode[images]'"
        ) from None
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InvalidRequestError(
                    f"an image has {width} x {height} pixels, more than {MAX_PIXELS}"
                )
            if image.mode.startswith(("I", "F")):
                raise InvalidRequestError("an image has more than 8 bits per channel")
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except InvalidRequestError:  # which is a ValueError
        raise
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"an image has more than {MAX_PIXELS} pixels") from None
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, struct.error, zlib.error):
        raise InvalidRequestError(
            "the data of an image is no PNG, JPEG or WebP file, or is damaged"
        ) from None

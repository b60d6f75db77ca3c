"""Images of prompts at a worker: read from messages, and their embeddings."""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.scoring.media import Encoder, Media
from anydecode.scoring.prompt_embeds import PromptEmbeds

#: Size of one piece of the embeddings that are handed over, in bytes.
PIECE_BYTES = 1 << 20
#: Maximum size of the embeddings that a worker keeps for later requests, in bytes.
MAX_CACHED_BYTES = 256 << 20


def read_media(plain: Mapping[str, Any]) -> Media:
    """The image that `Media.to_plain` has written.

    Raises:
        InvalidRequestError: The number of bytes is not that of the shape.
    """
    data = base64.b64decode(plain["data"])
    height, width, channels = plain["shape"]
    if min(height, width, channels) < 1 or height * width * channels != len(data):
        raise InvalidRequestError(
            f"an image of {height} x {width} x {channels} bytes has {len(data)} bytes"
        )
    pixels = np.frombuffer(data, np.uint8).reshape(height, width, channels)
    return Media(plain["first"], pixels)


class MediaCache:
    """A cache of the embeddings of the most recently used images. May be used on several threads,
    of which one encodes at a time.

    Args:
        encoder: Computes those that are not there.
        max_bytes: Maximum size of the embeddings that are kept.

    Attributes:
        num_encoded: The number of images that were encoded here.
    """

    def __init__(self, encoder: Encoder, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self.encoder = encoder
        self.num_encoded = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()  # of the table
        self._encoding = threading.Lock()

    def rows(self, media: Media) -> np.ndarray:
        """The embeddings of an image, float32 `[rows, hidden_size]`."""
        key = media.key(self.encoder)
        rows = self._found(key)
        if rows is not None:
            return rows
        with self._encoding:
            rows = self._found(key)  # another thread may have encoded it meanwhile
            if rows is None:
                rows = self.encoder.encode(media.pixels)
                self.num_encoded += 1
                with self._lock:
                    self._keep(key, rows)
        return rows

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def store(self, media: Media, pieces: Sequence[bytes]) -> bool:
        """Keep the embeddings that another worker has computed. False if they are not of the right
        size."""
        rows = np.frombuffer(b"".join(pieces), np.uint8)
        count, size = self.encoder.num_rows(media.pixels), self.encoder.hidden_size
        if len(rows) != 4 * count * size:
            return False
        with self._lock:
            self._keep(media.key(self.encoder), rows.view(np.float32).reshape(count, size))
        return True

    def _found(self, key: str) -> np.ndarray | None:
        with self._lock:
            if (rows := self._rows.get(key)) is not None:
                self._rows.move_to_end(key)
            return rows

    def _keep(self, key: str, rows: np.ndarray) -> None:
        if (before := self._rows.pop(key, None)) is not None:
            self._num_bytes -= before.nbytes
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes and len(self._rows) > 1:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes


class MediaEmbeds(PromptEmbeds):
    """The embeddings of an image in its prompt. They are computed or looked up when a forward pass
    needs them: not if all their keys and values are cached.

    Args:
        media: The image.
        cache: Has its embeddings, or computes them.
    """

    def __init__(self, media: Media, cache: MediaCache) -> None:
        placeholder = media.placeholder(cache.encoder)
        super().__init__(placeholder.first, placeholder.rows, key=placeholder.key)
        self._media, self._cache = media, cache

    def read(self) -> np.ndarray:
        return self._cache.rows(self._media)


def pieces_of(rows: np.ndarray) -> list[bytes]:
    """Embeddings as bytes, in pieces that a frame can carry."""
    data = np.ascontiguousarray(rows, np.float32).tobytes()
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]

"""An encoder of images with random weights: stands in for that of a vision model."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.kernels import portable

#: Maximum number of patches of an image.
MAX_PATCHES = 1024
_CHANNELS = 3


class PatchEncoder:
    """A small transformer over the patches of an image, whose weights are random.

    Sums are computed in a fixed order, so that the rows of an image have the same bits on every
    machine and with every number of threads.

    Args:
        hidden_size: The hidden size of the language model, that of the rows.
        patch: The side of a patch, in pixels.
        width: The hidden size of the encoder.
        layers: The number of layers.
        heads: The number of attention heads.
        seed: The seed of the weights.

    Attributes:
        image_size: The side of an image of 8 x 8 patches, in pixels; others are taken too.
        fingerprint: A digest of the weights, which two encoders share only if they are equal.
    """

    def __init__(
        self,
        hidden_size: int,
        patch: int = 8,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        seed: int = 0,
    ) -> None:
        self.hidden_size = hidden_size
        self.patch = patch
        self.image_size = 8 * patch
        self._heads = heads
        random = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            # Uniform with variance 1 / columns: normal numbers need functions of the C library.
            steps = random.integers(-(1 << 20), 1 << 20, (rows, columns)) / (1 << 20)
            values: np.ndarray = steps * math.sqrt(3 / columns)
            return values

        wide = 2 * width
        shapes = [*[(width, width)] * 4, (wide, width), (width, wide)]
        self._first = matrix(width, _CHANNELS * patch * patch)
        self._layers = [[matrix(*shape) for shape in shapes] for _ in range(layers)]
        self._last = matrix(hidden_size, width)
        digest = hashlib.sha256(f"patches {patch} {heads}".encode())
        for one in (self._first, *(one for layer in self._layers for one in layer), self._last):
            digest.update(one.tobytes())
        self.fingerprint = digest.hexdigest()

    def num_rows(self, pixels: np.ndarray) -> int:
        """The number of rows of an image.

        Raises:
            InvalidRequestError: `pixels` is not an image, or too large.
        """
        sides = pixels.shape[:2]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != _CHANNELS:
            raise InvalidRequestError(
                f"an image is {pixels.dtype} {list(pixels.shape)}; it must be uint8"
                " [height, width, 3]"
            )
        count = (sides[0] // self.patch) * (sides[1] // self.patch)
        if sides[0] % self.patch or sides[1] % self.patch or not 0 < count <= MAX_PATCHES:
            raise InvalidRequestError(
                f"an image has {sides[0]} x {sides[1]} pixels; both must be multiples of"
                f" {self.patch}, and it may have up to {MAX_PATCHES} patches of that side"
            )
        return count

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """The rows of an image, float32 `[patches, hidden_size]`: its patches from left to right
        and from top to bottom.

        Args:
            pixels: uint8 `[height, width, 3]`.

        Raises:
            InvalidRequestError: As for `num_rows`.
        """
        count, side = self.num_rows(pixels), self.patch
        height, width = pixels.shape[0] // side, pixels.shape[1] // side
        patches = pixels.reshape(height, side, width, side, _CHANNELS).swapaxes(1, 2)
        state = _product(patches.reshape(count, -1) / 127.5 - 1, self._first)
        state = state + _positions(height, width, state.shape[1])
        for query, key, value, output, up, down in self._layers:
            normed = _normed(state)
            queries, keys, values = (
                _product(normed, one).reshape(count, self._heads, -1).swapaxes(0, 1)
                for one in (query, key, value)
            )
            weights = _product(queries, keys) / math.sqrt(queries.shape[2])
            weights = portable.exp(weights - weights.max(2, keepdims=True))
            mixed = _product(weights / _sum(weights), values.swapaxes(1, 2))
            state = state + _product(mixed.swapaxes(0, 1).reshape(count, -1), output)
            state = state + _product(np.maximum(_product(_normed(state), up), 0), down)
        return _product(_normed(state), self._last).astype(np.float32)


def _product(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Products `[..., i, k]` of `[..., i, j]` and `[..., k, j]`, summed in the order of j."""
    total = np.zeros((*rows.shape[:-1], weight.shape[-2]))
    for j in range(rows.shape[-1]):
        total += rows[..., :, None, j] * weight[..., None, :, j]
    return total


def _sum(x: np.ndarray) -> np.ndarray:
    """The sum over the last axis, in its order."""
    return np.cumsum(x, -1)[..., -1:]


def _normed(rows: np.ndarray) -> np.ndarray:
    normed: np.ndarray = rows / np.sqrt(_sum(rows * rows) / rows.shape[1] + 1e-6)
    return normed


def _positions(height: int, width: int, size: int) -> np.ndarray:
    """Sines and cosines of the row and of the column of each patch, `[patches, size]`."""
    coordinates = np.stack(np.divmod(np.arange(height * width), width), 1)
    rates = 0.5 ** np.arange((size + 3) // 4)
    angles = (coordinates[:, :, None] * rates).reshape(height * width, -1)
    return np.concatenate(portable.sine_and_cosine(angles), 1)[:, :size]

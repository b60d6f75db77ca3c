"""Images in prompts, and what computes their embeddings."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anydecode.scoring.prompt_embeds import PromptEmbeds


class Encoder(Protocol):
    """Computes embeddings of images. Equal images give equal bits.

    Attributes:
        hidden_size: That of the language model.
        patch: The sides of an image are multiples of it, in pixels.
        image_size: The side of a square image that it takes, in pixels.
        fingerprint: A digest of everything that the embeddings depend on.
    """

    hidden_size: int
    patch: int
    image_size: int
    fingerprint: str

    def num_rows(self, pixels: np.ndarray) -> int:
        """The number of embeddings of an image.

        Raises:
            InvalidRequestError: The encoder does not take an image of this size or type.
        """
        ...

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """The embeddings, float32 `[rows, hidden_size]`."""
        ...


@dataclass(frozen=True, eq=False)
class Media:
    """An image in a prompt, which the encoder of a fleet replaces by embeddings.

    Args:
        first: Position in the prompt of the first token that an embedding replaces.
        pixels: uint8 `[height, width, 3]`.
    """

    first: int
    pixels: np.ndarray

    def key(self, encoder: Encoder) -> str:
        """A digest of the image and of the encoder."""
        digest = hashlib.sha256(f"{encoder.fingerprint} {self.pixels.shape}".encode())
        digest.update(np.ascontiguousarray(self.pixels).tobytes())
        return digest.hexdigest()

    def placeholder(self, encoder: Encoder) -> PromptEmbeds:
        """Embeddings with the key and the shape of those of the image, whose values are 0.

        Raises:
            InvalidRequestError: The encoder does not take an image of this size or type.
        """
        rows = np.broadcast_to(np.float32(0), (encoder.num_rows(self.pixels), encoder.hidden_size))
        return PromptEmbeds(self.first, rows, key=self.key(encoder))

    def to_plain(self) -> dict[str, Any]:
        """The image as JSON."""
        data = base64.b64encode(np.ascontiguousarray(self.pixels).tobytes()).decode()
        return {"first": self.first, "shape": list(self.pixels.shape), "data": data}

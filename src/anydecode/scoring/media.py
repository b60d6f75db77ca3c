"""Images in prompts, and what computes their embeddings."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anydecode.scoring.prompt_embeds import PromptEmbeds, check_within


class Encoder(Protocol):
    """Computes embeddings of images. Equal images give equal bits.

    Attributes:
        hidden_size: That of the language model.
        patch: The sides of an image are multiples of it, in pixels.
        fingerprint: A digest of everything that the embeddings depend on.
    """

    hidden_size: int
    patch: int
    fingerprint: str

    def num_rows(self, pixels: np.ndarray) -> int:
        """The number of embeddings of an image. Raises `InvalidRequestError`: it is none."""
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

    def placeholder(self, encoder: Encoder, length: int) -> PromptEmbeds:
        """Embeddings of the right name and number for a prompt of `length` tokens, all 0.

        Raises:
            InvalidRequestError: This is no image, or does not fit into the prompt.
        """
        count = encoder.num_rows(self.pixels)
        check_within(self.first, count, length)
        rows = np.broadcast_to(np.float32(0), (count, encoder.hidden_size))
        return PromptEmbeds(self.first, rows, key=self.key(encoder))

    def to_plain(self) -> dict[str, Any]:
        """The image as JSON."""
        data = base64.b64encode(np.ascontiguousarray(self.pixels).tobytes()).decode()
        return {"first": self.first, "shape": list(self.pixels.shape), "data": data}

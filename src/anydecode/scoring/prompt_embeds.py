"""Prompt positions given as embeddings instead of tokens: images, video frames, soft prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.scoring.state import StateKey


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Embeddings that replace consecutive tokens of a prompt.

    Args:
        first: Position in the prompt of the first replaced token.
        rows: float32 `[count, hidden_size]`, used unchanged (a model's embedding scale is not
            applied).
        importance: float32 `[count]`, the encoder's weight of each row (for example CLS
            attention), or None.
        key: A name of the rows that no others have, such as a digest of an image and its encoder.
            Empty: a digest of the rows.
        is_grid: Whether a square number of rows are the patches of an image, from left to right and
            from top to bottom. False where an encoder has merged some of them.
    """

    first: int
    rows: np.ndarray
    importance: np.ndarray | None = None
    key: str = ""
    is_grid: bool = True

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)

    def read(self) -> np.ndarray:
        """The rows, when a forward pass needs them."""
        return self.rows

    @property
    def name(self) -> str:
        """The key, or the digest of the rows in its place."""
        return self.key or hashlib.sha256(np.ascontiguousarray(self.rows).tobytes()).hexdigest()

    def check(self, prompt: list[int], hidden_size: int) -> None:
        """Raise `InvalidRequestError` if the rows do not fit the prompt or the model."""
        if self.rows.ndim != 2 or self.rows.shape[1] != hidden_size:
            raise InvalidRequestError(
                f"embeddings are [count, {hidden_size}], not {list(self.rows.shape)}"
            )
        if self.first < 0 or self.stop >= len(prompt) or not len(self.rows):
            raise InvalidRequestError("embeddings lie within the prompt, before its last token")
        if self.importance is not None and self.importance.shape != (len(self.rows),):
            raise InvalidRequestError("there is one importance per embedding")


def check_disjoint(ranges: Seq[tuple[int, int]]) -> None:
    """Raise `InvalidRequestError` if positions `(first, stop)` of several embeddings overlap."""
    ordered = sorted(ranges)
    for (_, stop), (first, _) in zip(ordered, ordered[1:], strict=False):
        if first < stop:
            raise InvalidRequestError(
                f"two embeddings are given for position {first} of the prompt; each position has"
                " one at most"
            )


def prefix_namespace(namespace: Hashable, names: Seq[tuple[int, str]]) -> Hashable:
    """The namespace of the cached prefixes of a prompt with embeddings, which prompts with others
    do not share: tokens in the place of embeddings do not tell them apart.

    Args:
        namespace: The namespace of the request.
        names: The first position and the name of each of the embeddings.
    """
    if not names:
        return namespace
    digest = hashlib.sha256(repr((namespace, sorted(names))).encode())
    return f"embeddings {digest.hexdigest()}"


#: The embeddings given with the prompt.
PROMPT_EMBEDS: StateKey[tuple[PromptEmbeds, ...]] = StateKey("request", "prompt_embeds")

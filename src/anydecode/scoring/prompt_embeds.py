"""Prompt positions given as embeddings instead of tokens: images, video frames, soft prompts."""

from __future__ import annotations

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
    """

    first: int
    rows: np.ndarray
    importance: np.ndarray | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)

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


#: The embeddings given with the prompt.
PROMPT_EMBEDS: StateKey[PromptEmbeds] = StateKey("request", "prompt_embeds")

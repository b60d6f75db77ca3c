"""Rows of a prompt that are given as embeddings: images, frames, soft prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anydecode.errors import InvalidRequestError


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """`rows`, float32 `[count, hidden_size]`, stand in place of the prompt's tokens from position
    `first` on. They are taken as they are (a model's embedding scale is not applied). `importance`,
    float32 `[count]`, says how much the encoder made of each (CLS attention, say)."""

    first: int
    rows: torch.Tensor
    importance: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)

    def check(self, prompt: list[int], hidden_size: int) -> None:
        """Raise `InvalidRequestError` where the rows do not fit the prompt or the model."""
        if self.rows.ndim != 2 or self.rows.shape[1] != hidden_size:
            raise InvalidRequestError(
                f"embeddings are [count, {hidden_size}], not {list(self.rows.shape)}"
            )
        if self.first < 0 or self.stop >= len(prompt) or not len(self.rows):
            raise InvalidRequestError("embeddings lie within the prompt, before its last token")
        if self.importance is not None and self.importance.shape != (len(self.rows),):
            raise InvalidRequestError("there is one importance per embedding")

"""Rewards that read the embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.rewards.reward import Reward, check_seconds


def unit_embeddings(llm: LLM, texts: Seq[str]) -> np.ndarray:
    """Embeddings of length 1, float64 `[texts, embedding_size]`. Texts that are longer than the
    model's context are cut."""
    rows = np.array(llm.embed(texts, truncate_prompt_tokens=-1))
    result: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return result


class EmbeddingReward(Reward):
    """Values texts by their embeddings.

    Args:
        llm: The model that computes the embeddings.
        seconds: How long a batch may take for each of its texts.

    Raises:
        InvalidRequestError: `llm` is no model, or `seconds` is not above 0.
    """

    def __init__(self, llm: LLM, seconds: float) -> None:
        if not isinstance(llm, LLM):
            raise InvalidRequestError(
                f"{self.name} needs the LLM that computes the embeddings, not {llm!r}"
            )
        check_seconds(seconds)
        self.llm = llm
        self.seconds = seconds

    def embeddings(self, texts: Seq[str]) -> np.ndarray:
        """As `unit_embeddings`, of texts that may be empty."""
        return unit_embeddings(self.llm, [text or " " for text in texts])

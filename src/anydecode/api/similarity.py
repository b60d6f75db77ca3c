"""A reward that compares embeddings."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from anydecode.api.embedding_reward import EmbeddingReward
from anydecode.api.llm import LLM
from anydecode.rewards.reward import SampledText


class Similarity(EmbeddingReward):
    """The cosine similarity of a text's embedding with that of a reference.

    Args:
        llm: The model that computes the embeddings: an encoder, or any other. It may be another
            than the one that generates.
        reference: The text that the others should resemble. Default: the prompt.
        seconds: How long a batch may take for each of its texts.

    Texts that are longer than the model's context are cut.

    Raises:
        InvalidRequestError: `llm` is no model, or `seconds` is not above 0.
    """

    bounds = (-1.0, 1.0)

    def __init__(self, llm: LLM, reference: str | None = None, seconds: float = 30.0) -> None:
        super().__init__(llm, seconds)
        self.reference = reference

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        reference = prompt if self.reference is None else self.reference
        rows = self.embeddings([reference, *(one.text for one in texts)])
        return [float(value) for value in np.clip(rows[1:] @ rows[0], -1.0, 1.0)]

"""A reward that classifies embeddings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.sentence_diffusion import EmbeddingClassifier
from anydecode.rewards.reward import Reward, SampledText


class Attribute(Reward):
    """The probability that a text has the attribute of a classifier of embeddings, which
    `anydecode train classifier` makes.

    Args:
        llm: The sentence encoder that the classifier was trained with.
        classifier: The file of the classifier.
        seconds: How long a batch may take for each of its texts.

    Raises:
        CheckpointError: There is no such file, or it is no classifier.
        InvalidRequestError: The classifier was trained for embeddings of another size.
    """

    bounds = (0.0, 1.0)

    def __init__(self, llm: LLM, classifier: str | Path, seconds: float = 30.0) -> None:
        self.llm = llm
        self.classifier = EmbeddingClassifier.load(Path(classifier))
        self.seconds = seconds
        size, expected = llm.model.spec.hidden_size, len(self.classifier.weight)
        if size != expected:
            raise InvalidRequestError(
                f"the classifier was trained for embeddings of {expected} numbers, and those of"
                f" {llm.model.name} have {size}: use the encoder that it was trained with"
            )

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        rows = np.array(self.llm.embed([one.text or " " for one in texts]))
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return [0.5 + 0.5 * float(np.tanh(0.5 * one)) for one in self.classifier.logits(rows)]

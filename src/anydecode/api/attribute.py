"""A reward that classifies embeddings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from anydecode.api.embedding_reward import EmbeddingReward
from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.classification import sigmoid
from anydecode.models.sentence_diffusion import EmbeddingClassifier
from anydecode.rewards.reward import SampledText


class Attribute(EmbeddingReward):
    """The probability that a text has the attribute of a classifier of embeddings, which
    `anydecode train classifier` makes.

    Args:
        llm: The sentence encoder that the classifier was trained with.
        classifier: The file of the classifier.
        seconds: How long a batch may take for each of its texts.

    Texts that are longer than the encoder's context are cut, as those of the training.

    Raises:
        CheckpointError: There is no such file, or it is no classifier.
        InvalidRequestError: The classifier was trained for embeddings of another size, `llm` is no
            model, or `seconds` is not above 0.
    """

    bounds = (0.0, 1.0)

    def __init__(self, llm: LLM, classifier: str | Path, seconds: float = 30.0) -> None:
        super().__init__(llm, seconds)
        if not isinstance(classifier, (str, Path)):
            raise InvalidRequestError(
                f"Attribute reads a classifier from a file, not from {classifier!r}"
            )
        self.classifier = EmbeddingClassifier.load(Path(classifier))
        size, expected = llm.model.spec.hidden_size, len(self.classifier.weight)
        if size != expected:
            raise InvalidRequestError(
                f"the classifier was trained for embeddings of {expected} numbers, and those of"
                f" {llm.model.name} have {size}: use the encoder that it was trained with"
            )

    def values(self, prompt: str, texts: Seq[SampledText]) -> list[float]:
        embeddings = self.embeddings([text.text for text in texts])
        return [float(value) for value in sigmoid(self.classifier.logits(embeddings))]

"""A classifier of sentence embeddings for the decoder `dglm`: one logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anydecode.api.embedding_reward import unit_embeddings
from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.sentence_diffusion import EmbeddingClassifier
from anydecode.training.logistic import fit_logistic

#: The penalty of the authors' code.
PENALTY = 1e-3
#: The share of the texts that are not trained on.
HELD_OUT = 0.125


@dataclass(frozen=True)
class FittedClassifier:
    """A classifier and how often it is right.

    Attributes:
        classifier: The classifier.
        num_texts: How many texts it was fitted to.
        accuracy: The share of right labels of held-out texts.
    """

    classifier: EmbeddingClassifier
    num_texts: int
    accuracy: float


def fit_classifier(
    encoder: LLM, pairs: Sequence[tuple[str, bool]], *, penalty: float = PENALTY, seed: int = 0
) -> FittedClassifier:
    """Fit a classifier to texts with labels.

    Args:
        encoder: The sentence encoder.
        pairs: The texts, and whether each has the attribute.
        penalty: Of half the squared length of the weights.
        seed: Of the order of the texts, an eighth of which is held out.

    Raises:
        InvalidRequestError: The texts that are fitted are all of one kind.
    """
    order = np.random.default_rng(seed).permutation(len(pairs))
    kinds = np.array([pairs[i][1] for i in order], bool)
    first = max(1, int(HELD_OUT * len(pairs)))
    if len(set(kinds[first:].tolist())) < 2:
        raise InvalidRequestError(
            f"a classifier needs texts of both labels, and {len(pairs)} texts are too few or of one"
            " label"
        )
    texts = [pairs[i][0] for i in order]
    rows = unit_embeddings(encoder, texts)
    weight, bias = fit_logistic(rows[first:], kinds[first:], penalty)
    fitted = EmbeddingClassifier(weight, bias)
    accuracy = float(((fitted.logits(rows[:first]) > 0) == kinds[:first]).mean())
    return FittedClassifier(fitted, len(pairs) - first, accuracy)

"""Contrastive decoding (Li et al., arXiv:2210.15097): prefers what a large model finds more
probable than a small one does."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.two_models import mixed_decoding
from anydecode.errors import InvalidRequestError
from anydecode.sampling.contrast import Plausible, contrasted
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import log_probabilities
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, Sequence


@register(
    Card(
        "contrastive-decoding",
        "alignment",
        paper="Contrastive Decoding: Open-ended Text Generation as Optimization (arXiv:2210.15097)",
        exactness="lossy",
        summary="Among the tokens that the model finds plausible, prefers those that a smaller"
        " model finds less probable.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "one text, by argmax at temperature 0 and by sampling above; the paper's beam search of"
            " width 5 is not implemented",
            "the amateur sees the whole text; the authors' code can hide the prompt from it",
            "the plausible set is that of the model without penalties, bans and the constraint; if"
            " those leave no plausible token, the expert decides among the others",
            "tokens with equal scores are taken in the order of their ids",
        ),
        remote={
            "ratio": Range(1e-6, 1),
            "weight": Range(0, 10),
            "amateur_temperature": Range(0.05, 10),
        },
    )
)
class ContrastiveDecoding(Decoder):
    """Contrastive decoding: the score of a token is `ln p(expert) - weight * ln p(amateur)` if it
    is at least `ratio` times as probable as the best token of the expert, else the token is
    dropped.

    The expert is the model at temperature 1, the amateur is the draft model. The request's sampler
    applies to the scores: at temperature 0 the token with the highest score is taken. With `weight`
    0 or `ratio` 1 that is greedy decoding.

    Args:
        ratio: Minimum probability of a token relative to the expert's best one (the paper's alpha).
        weight: The factor of the amateur's log-probability.
        amateur_temperature: The temperature of the amateur.
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self, ratio: float = 0.1, weight: float = 1.0, amateur_temperature: float = 0.5
    ) -> None:
        if not (0 < ratio <= 1 and 0 <= weight <= 100 and 0.01 <= amateur_temperature <= 100):
            raise InvalidRequestError(
                "contrastive-decoding needs 0 < ratio <= 1, a weight from 0 to 100 and an"
                f" amateur_temperature from 0.01 to 100, not {ratio}, {weight} and"
                f" {amateur_temperature}"
            )
        self.ratio = ratio
        self.weight = weight
        self.amateur_temperature = amateur_temperature

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        sequence.sampler = Sampler(
            sampler.temperature,
            sampler.pre_temperature,
            (Plausible(), *sampler.post_temperature),
            sampler.combiner,
        )

    def decode(self, sequence: Sequence) -> Decoding:
        return mixed_decoding(sequence, self._scores)

    def _scores(self, expert: np.ndarray, amateur: np.ndarray) -> np.ndarray:
        e, _ = log_probabilities(expert)
        a, _ = log_probabilities(amateur / np.float32(self.amateur_temperature))
        return contrasted(e, a, self.ratio, self.weight)

"""Transfer Q* (Chakraborty et al., "Transfer Q Star: Principled Decoding for LLM Alignment",
arXiv:2405.20495).

Before each token the most probable ones are continued by an aligned model, and the reward of a
continuation, as an estimate of the value of its token, is added to the token's logit.
"""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.errors import InvalidRequestError, RewardError
from anydecode.rewards import registry
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence

#: The largest exponent of the indirect estimate.
_MAX_EXPONENT = 50.0


@register(
    Card(
        "transfer-q",
        "alignment",
        paper="Transfer Q Star: Principled Decoding for LLM Alignment (arXiv:2405.20495)",
        exactness="lossy",
        summary="Before each token, an aligned model continues the most probable ones, and the"
        " rewards of the continuations are added to the logits.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the aligned model is the draft model; without one the model itself continues, as in"
            " the authors' code, where one model does both",
            "the default reward is the geometric mean of the probabilities of the text's tokens"
            " under the model itself; the paper's is a trained reward model, which is given as a"
            " function",
            "continuations have the temperature of the request; those of the authors' code have the"
            " settings of the checkpoint",
            "texts end at the model's end token; those of the authors' code always have 128 tokens",
            "the request's truncations are ignored: only the k most probable tokens are considered",
            "the log-probability that a reward may read is, of a continuation, that of the model"
            " that has sampled it",
        ),
        remote={
            "k": Range(1, 10),
            "length": Range(0, 64),
            "weight": Range(0, 1000),
            "reward": registry.RewardName(),
            "source": registry.RewardName(),
        },
    )
)
class TransferQ(Decoder):
    """Scores each of the `k` most probable tokens by `logit + weight * r`, where r is the reward of
    the text with the token and its continuation: at temperature 0 the highest score is taken, else
    a token is sampled from the softmax of the scores divided by the temperature.

    With a `source`, the reward that the aligned model was trained for, the transfer is indirect:
    `r = exp((reward - source) / 2) * reward`. With `length` 0 nothing is continued (ARGS). With
    `weight` 0 and temperature 0 the output is that of greedy decoding.

    Args:
        k: How many tokens are continued.
        length: Maximum number of tokens of a continuation.
        weight: The factor of the reward: the inverse of the paper's alpha.
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`.
        source: A second reward, for indirect transfer. Default: direct transfer.
    """

    requirements = Requirements(optional_runners=(DRAFT,), forks_text=True)

    def __init__(
        self,
        k: int = 10,
        length: int = 20,
        weight: float = 1.0,
        reward: registry.RewardChoice = "confidence",
        source: registry.RewardChoice | None = None,
    ) -> None:
        if k < 1 or length < 0 or weight < 0:
            raise InvalidRequestError(
                "transfer-q needs k of at least 1, and length and weight of at least 0, not"
                f" {k}, {length} and {weight}"
            )
        self.k = k
        self.length = length
        self.weight = weight
        self.valuing = Valuing(registry.build(reward))
        self.source = None if source is None else Valuing(registry.build(source))

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes + (0 if self.source is None else self.source.num_bytes)

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        sequence.sampler = Sampler(
            sampler.temperature, sampler.pre_temperature, combiner=sampler.combiner
        )

    def decode(self, sequence: Sequence) -> Decoding:
        runner = DRAFT if DRAFT in sequence.optional_runners else TARGET
        temperature = sequence.sampler.temperature
        reads = [one.reward.reads_logprobs for one in (self.valuing, self.source) if one]
        looking = Looking(self.k, self.length, temperature, runner, any(reads))
        while not sequence.finished:
            scores = yield sequence.score()
            row = scores.row(-1).copy()
            found = yield from looking.ahead(sequence, scores)
            values = yield from self.valuing.values(sequence, found.texts)
            if self.source is not None:
                sources = yield from self.source.values(sequence, found.texts)
                values = [_indirect(*pair) for pair in zip(values, sources, strict=True)]
            totals = found.logprobs + self.weight * np.array(values)
            choice = self._choice(sequence, found.tokens, totals)
            looking.emit(sequence, found, choice, row)

    @staticmethod
    def _choice(sequence: Sequence, tokens: list[int], totals: np.ndarray) -> int:
        """The number of the token that is taken or sampled."""
        temperature = sequence.sampler.temperature
        if temperature == 0:
            return int(totals.argmax())
        order = np.argsort(tokens)
        ids = np.array(tokens, np.int32)[order]
        scores = (totals[order] / temperature).astype(np.float32)
        token = Distribution(ids, scores).sample(sequence.noise, sequence.length)
        return tokens.index(token)


def _indirect(reward: float, source: float) -> float:
    """The estimate for another reward than that of the aligned model."""
    exponent = (reward - source) / 2
    if exponent > _MAX_EXPONENT:
        raise RewardError(
            f"transfer-q: the rewards are {reward:g} and {source:g}; they may differ by at most"
            f" {2 * _MAX_EXPONENT:g}: scale them alike"
        )
    return math.exp(exponent) * reward

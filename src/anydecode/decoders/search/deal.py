"""DeAL (Huang et al., "DeAL: Decoding-time Alignment for Large Language Models", arXiv:2402.06147).

Before each token the most probable ones are continued greedily, and the token whose continuation
has the highest value is taken.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.beam import whole_distribution_sampler
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.errors import InvalidRequestError
from anydecode.rewards import registry
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "deal",
        "alignment",
        paper="DeAL: Decoding-time Alignment for Large Language Models (arXiv:2402.06147)",
        exactness="lossy",
        summary="Before each token, continues the most probable ones greedily and takes the one"
        " whose continuation has the best value.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the default reward is the geometric mean of the probabilities of the text's tokens"
            " under the model itself; the paper's are programs and trained reward models, which are"
            " given by name or as a function",
            "one text; the paper also keeps several prefixes",
            "the weight of the reward is not published; the default is 5",
        ),
        remote={
            "k": Range(1, 10),
            "length": Range(0, 64),
            "weight": Range(0, 1000),
            "reward": registry.RewardName(),
        },
    )
)
class Deal(Decoder):
    """Takes the token with the highest `ln p(token) + weight * reward(text with the token and its
    continuation)` among the `k` most probable ones.

    A continuation is greedy and has up to `length` tokens; it ends where the text would end.
    Temperature and truncations of the request are ignored. With `k` 1 or `weight` 0 the output is
    that of greedy decoding.

    Args:
        k: How many tokens are continued.
        length: Maximum number of tokens of a continuation.
        weight: The factor of the reward (the paper's lambda).
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`.
    """

    requirements = Requirements(can_sample=False, forks_text=True, max_texts=1)

    def __init__(
        self,
        k: int = 5,
        length: int = 32,
        weight: float = 5.0,
        reward: registry.RewardChoice = "confidence",
    ) -> None:
        if k < 1 or length < 0 or weight < 0:
            raise InvalidRequestError(
                "deal needs k of at least 1, and length and weight of at least 0, not"
                f" {k}, {length} and {weight}"
            )
        self.valuing = Valuing(registry.build(reward))
        self.weight = weight
        self.k = k
        self.length = length

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes

    def prepare(self, sequence: Sequence) -> None:
        sequence.sampler = whole_distribution_sampler(sequence.sampler)

    def decode(self, sequence: Sequence) -> Decoding:
        reads = self.valuing.reward.reads_logprobs
        looking = Looking(self.k, self.length, temperature=0.0, reads_logprobs=reads)
        while not sequence.finished:
            scores = yield sequence.score()
            row = scores.row(-1).copy()
            found = yield from looking.ahead(sequence, scores)
            values = yield from self.valuing.values(sequence, found.texts)
            totals = found.logprobs + self.weight * np.array(values)
            looking.emit(sequence, found, int(totals.argmax()), row)

"""Best-of-n sampling (Stiennon et al., arXiv:2009.01325, among others).

Several texts are sampled, a reward values each, and the best is the answer.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import (
    Rollout,
    Rollouts,
    checked_count,
    independent_rollouts,
)
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.beam import emit_ranked
from anydecode.rewards import registry
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

_STATE: StateKey[list[Rollout]] = StateKey("best-of-n", "rollouts")


@register(
    Card(
        "best-of-n",
        "search",
        paper="Learning to Summarize from Human Feedback (arXiv:2009.01325)",
        exactness="lossy",
        summary="Samples several texts and keeps the one to which a reward gives the highest"
        " value.",
        works_with=("constraints", "samplers", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when all texts have ended, not while they are sampled",
            "the default reward is the mean log-probability of the text's tokens under the model"
            " itself; the paper's is a model trained on people's choices, which is given as a"
            " function",
        ),
        remote={"n": Range(1, 16), "reward": registry.RewardName()},
    )
)
class BestOfN(Decoder):
    """The best of `n` sampled texts by a reward; of equal values the first.

    The texts are those that plain decoding gives for `n` samples with the same seed, so `n` = 1 is
    plain decoding, and so is a reward that values all texts alike. At temperature 0 there is only
    one text. A request with `n` above 1 receives the best texts, best first, with their values.

    Args:
        n: How many texts are sampled, and the largest `n` of a request.
        reward: The name of a reward, such as "likelihood" or "keywords:words=cat dog", a function
            `(prompt, texts) -> values`, or a `Reward`.
    """

    def __init__(self, n: int = 8, reward: registry.RewardChoice = "likelihood") -> None:
        self.n = checked_count("best-of-n", n)
        self.valuing = Valuing(registry.build(reward))
        self.requirements = Requirements(max_texts=n, forks_text=True)

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes

    def decode(self, sequence: Sequence) -> Decoding:
        rollouts = independent_rollouts(sequence, _STATE, self.n)
        group = Rollouts(sequence, rollouts, sums_logprobs=self.valuing.reward.reads_logprobs)
        yield from group.extend(lambda number: False)
        values = yield from self.valuing.values(sequence, group.texts())
        group.release()
        order = sorted(range(len(values)), key=lambda number: -values[number])
        emit_ranked(
            sequence,
            [
                RankedText(values[number], rollouts[number].tokens, rollouts[number].logprobs)
                for number in order
            ],
        )

"""Self-consistency (Wang et al., arXiv:2203.11171): a vote among the answers of several texts."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import (
    Rollout,
    Rollouts,
    checked_count,
    independent_rollouts,
)
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.beam import emit_ranked
from anydecode.rewards import answers, registry
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

_STATE: StateKey[list[Rollout]] = StateKey("majority-vote", "rollouts")


@register(
    Card(
        "majority-vote",
        "search",
        paper="Self-Consistency Improves Chain of Thought Reasoning in Language Models"
        " (arXiv:2203.11171)",
        exactness="lossy",
        summary="Samples several texts and keeps one with the most frequent answer.",
        works_with=("constraints", "samplers", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when all texts have ended, not while they are sampled",
            "the answer of a text is its last number, or its last line; the paper has a pattern for"
            " each task, which is given as a function",
            "a text without an answer does not vote",
        ),
        remote={
            "n": Range(1, 16),
            "answer": Words(tuple(answers.ANSWERS)),
            "weights": registry.RewardName(),
        },
    )
)
class MajorityVote(Decoder):
    """The first text with the most frequent answer of `n` sampled texts; of answers that are
    equally frequent the one that comes first. If no text has an answer, the first text.

    The texts are those that plain decoding gives for `n` samples with the same seed. At temperature
    0 there is only one. A request with `n` above 1 receives one text per answer, the most frequent
    first; the score of each is the share of its votes.

    Args:
        n: How many texts are sampled, and the largest `n` of a request.
        answer: What of a text votes: "last-number", "last-line", or a function from the text to its
            answer, None if it has none.
        weights: A reward from 0 up, whose values are the weights of the votes. Default: all votes
            have the same weight.
    """

    def __init__(
        self,
        n: int = 8,
        answer: str | answers.AnswerFinder = "last-number",
        weights: registry.RewardChoice | None = None,
    ) -> None:
        self.n = checked_count("majority-vote", n)
        self.answer = answers.build(answer)
        self.valuing = (
            None if weights is None else Valuing(registry.build(weights), (0.0, float("inf")))
        )
        self.requirements = Requirements(max_texts=n, forks_text=True)

    @property
    def num_bytes(self) -> int:
        return 0 if self.valuing is None else self.valuing.num_bytes

    def decode(self, sequence: Sequence) -> Decoding:
        rollouts = independent_rollouts(sequence, _STATE, self.n)
        valuing = self.valuing
        reads = valuing is not None and valuing.reward.reads_logprobs
        group = Rollouts(sequence, rollouts, sums_logprobs=reads)
        yield from group.extend(lambda number: False)
        texts = group.texts()
        weights = [1.0] * len(texts)
        if valuing is not None:
            weights = yield from valuing.values(sequence, texts)
        group.release()
        found = [self.answer(one.text) for one in texts]
        emit_ranked(
            sequence,
            [
                RankedText(share, rollouts[number].tokens, rollouts[number].logprobs)
                for share, number in winners(found, weights)
            ],
        )


def winners(found: list[str | None], weights: list[float]) -> list[tuple[float, int]]:
    """The share of the votes and the first text of every answer, the most frequent first. Without
    any vote, the first text with a share of 0."""
    votes: dict[str, float] = {}
    first: dict[str, int] = {}
    for number, (answer, weight) in enumerate(zip(found, weights, strict=True)):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + weight
            first.setdefault(answer, number)
    total = sum(votes.values())
    if not votes:
        return [(0.0, 0)]
    ranked = sorted(votes, key=lambda answer: (-votes[answer], first[answer]))
    return [(votes[answer] / total if total else 0.0, first[answer]) for answer in ranked]

"""Diverse beam search (Vijayakumar et al., arXiv:1610.02424).

The hypotheses are divided into groups. At every position the groups choose one after another, and a
token costs more the more often earlier groups have chosen it there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.search.beam import emit_ranked, whole_distribution_sampler
from anydecode.decoders.search.beam_group import BeamGroup, GroupState, LengthRule
from anydecode.errors import InvalidRequestError
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

_STATE: StateKey[list[GroupState]] = StateKey("diverse-beam", "state")


@register(
    Card(
        "diverse-beam",
        "search",
        paper="Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models"
        " (arXiv:1610.02424)",
        exactness="lossy",
        summary="Beam search in groups that avoid each other's tokens, for texts that differ.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when the search ends, not while it runs",
            "only the Hamming diversity; not the cumulative, n-gram and embedding ones",
            "all groups are at the same position, where the authors' code runs them staggered:"
            " the choices are the same",
            "a token that ends a hypothesis does not count as a choice",
            "the best texts of the groups come first, in the order of their scores without the"
            " costs of diversity",
        ),
        remote={
            "width": Range(1, 16),
            "groups": Range(1, 16),
            "strength": Range(0, 100),
            "penalty": Range(-50, 50),
        },
    )
)
class DiverseBeam(Decoder):
    """Beam search over `width` hypotheses in `groups` groups of equal size.

    Within a group a hypothesis counts `(sum of log-probabilities - costs) / number of tokens **
    penalty`, where each of its tokens costs `strength` for each hypothesis of an earlier group that
    chose the same token at the same position. With one group, or a strength of 0, each group gives
    the texts of `beam` at the group's width. Temperature and truncations are ignored, as in `beam`.
    A request with `n` above 1 receives different texts of one search: the best of each group, then
    the second best, and so on.

    Args:
        width: How many hypotheses are kept in all, and the largest `n`.
        groups: How many groups they form; divides `width`. Default: as many as hypotheses, which
            gives the most diversity.
        strength: The cost of a choice that an earlier group has made.
        penalty: The exponent of the length, between -50 and 50.
    """

    def __init__(
        self,
        width: int = 4,
        groups: int | None = None,
        strength: float = 0.5,
        penalty: float = 1.0,
    ) -> None:
        groups = width if groups is None else groups
        if width < 1 or groups < 1 or width % groups:
            raise InvalidRequestError(
                f"width is {width} and groups is {groups}; diverse-beam needs a width of 1 or more"
                " that groups divides"
            )
        if not (0 <= strength <= 1e6 and -50 <= penalty <= 50):
            raise InvalidRequestError(
                "diverse-beam needs a strength from 0 to 1000000 and a penalty from -50 to 50, not"
                f" {strength} and {penalty}"
            )
        self.groups = groups
        self.strength = strength
        self.rule = LengthRule(width // groups, penalty)
        self.requirements = Requirements(can_sample=False, max_texts=width)

    def prepare(self, sequence: Sequence) -> None:
        sequence.sampler = whole_distribution_sampler(sequence.sampler)

    def decode(self, sequence: Sequence) -> Decoding:
        states = sequence.state.setdefault(_STATE, [GroupState() for _ in range(self.groups)])
        prompt = yield sequence.score()  # first, so that all branches share it
        groups = [BeamGroup(self.rule, sequence, state) for state in states]
        for group in groups:
            yield from group.open()
        while active := [group for group in groups if group.is_active]:
            found = [[prompt]] * len(active)
            if active[0].state.depth:
                requests = [group.requests() for group in active]
                results = iter((yield [request for several in requests for request in several]))
                found = [[next(results) for _ in several] for several in requests]
            choices: Counter[int] = Counter()
            for group, several in zip(active, found, strict=True):
                costs = {token: self.strength * count for token, count in choices.items()}
                group.advance(several, costs)
                choices.update(hypothesis.tokens[-1] for hypothesis in group.state.live)
        emit_ranked(sequence, self._ranked([group.texts() for group in groups]))

    def _ranked(self, found: list[list[RankedText]]) -> list[RankedText]:
        """The different texts of all groups: the best of each first."""
        ranked: dict[tuple[int, ...], RankedText] = {}
        for place in range(max(map(len, found))):
            texts = [self._without_costs(texts[place]) for texts in found if place < len(texts)]
            for text in sorted(texts, key=lambda text: -text.score):
                ranked.setdefault(tuple(text.tokens), text)
        return list(ranked.values())

    def _without_costs(self, text: RankedText) -> RankedText:
        score = text.score + self.rule.score(text.costs, len(text.tokens))
        return replace(text, score=score, costs=0.0)

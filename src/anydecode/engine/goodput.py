"""SmartSpec for a whole server: goodput over all requests decides how much each one drafts.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv:2406.14066.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.decoders.speculative.core import DraftBudget, SpeculationRound, Speculative
from anydecode.decoders.speculative.goodput import DraftCosts, LinearCost, RunningSet, SmartSpec
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class MinBudget(DraftBudget):
    """The smaller of two budgets; both learn from every round."""

    def __init__(self, ours: DraftBudget, theirs: DraftBudget) -> None:
        self.ours, self.theirs = ours, theirs

    def size(self, sequence: Sequence) -> int:
        return min(self.ours.size(sequence), self.theirs.size(sequence))

    def observe(self, round: SpeculationRound) -> None:
        self.ours.observe(round)
        self.theirs.observe(round)


class LoadLimited(SmartSpec):
    """`inner`, never drafting more than is good for everybody who shares `load`."""

    def __init__(self, inner: Speculative, load: RunningSet, largest: int) -> None:
        super().__init__(inner.drafter, largest)
        self.inner, self.load = inner, load
        self.acceptance = inner.acceptance

    def budget(self, sequence: Sequence) -> DraftBudget:
        return MinBudget(super().budget(sequence), self.inner.budget(sequence))

    def prepare(self, sequence: Sequence) -> None:
        self.inner.prepare(sequence)


@register(
    Card(
        "smartspec-server",
        "serving",
        paper="Liu et al. 2024, SmartSpec, arXiv:2406.14066",
        exactness="token-exact",
        summary="One goodput over all requests and drafters caps what each request drafts.",
        deviations=(
            "an upper bound: a method's own budget may draft less",
            "methods whose text depends on what is drafted (rejection sampling, lossy acceptance)"
            " are left alone, so that no answer depends on the load",
        ),
    )
)
class ServerGoodput:
    """Wraps the speculative decoders of one server so that they share one `Load`. With `fixed`, the
    costs of a pass are given; else they are what the engine measured."""

    def __init__(
        self,
        largest: int = 8,
        fixed: float | None = None,
        per_row: float = 0.1,
        per_position: float = 0.0,
    ) -> None:
        if largest < 1:
            raise InvalidRequestError("smartspec-server needs largest of 1 or more")
        self.largest = largest
        cost = None if fixed is None else LinearCost(fixed, per_row, per_position)
        self.load = RunningSet(DraftCosts(cost))

    def over(self, decoder: Decoder) -> Decoder:
        """`decoder` under the common load, or itself where it does not draft by a budget."""
        if not isinstance(decoder, Speculative) or type(decoder.acceptance) is not TokenExact:
            return decoder
        if type(decoder).decode is not Speculative.decode:
            return decoder
        return LoadLimited(decoder, self.load, self.largest)

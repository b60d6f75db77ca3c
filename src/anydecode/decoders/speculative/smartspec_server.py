"""SmartSpec for a server: the draft length of each request maximises goodput over all requests.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv:2406.14066.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import DraftBudget, SpeculationRound, Speculative
from anydecode.decoders.speculative.goodput import DraftCosts, user_cost
from anydecode.decoders.speculative.smartspec import RunningSet, SmartSpec
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class MinBudget(DraftBudget):
    """The smaller of two budgets; both observe every round."""

    def __init__(self, first: DraftBudget, second: DraftBudget) -> None:
        self.first, self.second = first, second

    def size(self, sequence: Sequence) -> int:
        return min(self.first.size(sequence), self.second.size(sequence))

    def observe(self, round: SpeculationRound) -> None:
        self.first.observe(round)
        self.second.observe(round)


class LoadLimited(SmartSpec):
    """`inner` with its draft length limited by the goodput over all requests of `load`."""

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
        use="LLM(drafting='smartspec-server') or anydecode serve --drafting smartspec-server",
        summary="Limits draft lengths by the goodput over all requests.",
        deviations=(
            "the limit is an upper bound: a method's own budget may draft less",
            "methods whose text depends on the drafts (rejection sampling, lossy acceptance) are"
            " not limited, so that no result depends on the load",
            "`auto`, which weighs its drafts by the load itself, and methods with a loop of their"
            " own (`jacobi`, `layerskip`, `pearl`, `saguaro`) are not limited",
        ),
    )
)
class ServerGoodput:
    """Wraps the speculative decoders of one server so that they share one `RunningSet`.

    Args:
        max_drafts: Maximum draft length.
        fixed: Fixed cost of a pass; None to use the costs that the engine measured.
        per_row: Cost per row, with `fixed`.
        per_position: Cost per cached position, with `fixed`.
    """

    def __init__(
        self,
        max_drafts: int = 8,
        fixed: float | None = None,
        per_row: float = 0.1,
        per_position: float = 0.0,
    ) -> None:
        if max_drafts < 1:
            raise InvalidRequestError(
                f"max_drafts is {max_drafts}; smartspec-server needs 1 or more"
            )
        self.max_drafts = max_drafts
        self.load = RunningSet(DraftCosts(user_cost(fixed, per_row, per_position)))

    def over(self, decoder: Decoder) -> Decoder:
        """`decoder` limited by the common load, or `decoder` itself if it has no draft budget."""
        if not isinstance(decoder, Speculative) or type(decoder.acceptance) is not TokenExact:
            return decoder
        if type(decoder).decode is not Speculative.decode:
            return decoder
        return LoadLimited(decoder, self.load, self.max_drafts)

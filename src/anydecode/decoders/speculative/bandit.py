"""Draft lengths by Thompson sampling: the length that is best for an acceptance rate drawn from its
posterior (as in Liu et al., EESD, arXiv:2406.03853)."""

from __future__ import annotations

from random import Random

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.goodput import (
    DraftCosts,
    chain_drafter,
    expected_tokens,
    user_cost,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class BanditBudget(DraftBudget):
    """Thompson sampling: an acceptance rate is drawn from its posterior, Beta(accepted + 1,
    rejected + 1), and the draft length that is best at this rate is used. Counts decay by `memory`
    per round.
    """

    def __init__(self, sequence: Sequence, costs: DraftCosts, max_size: int, memory: float) -> None:
        self.costs = costs
        self.max_size = max_size
        self.memory = memory
        self.accepted = 0.0
        self.rejected = 0.0
        self._random = Random(f"{sequence.noise.seed}/{sequence.noise.stream}")

    def size(self, sequence: Sequence) -> int:
        rate = self._random.betavariate(self.accepted + 1, self.rejected + 1)
        num_others = sequence.cost_model.num_others()

        def goodput(size: int) -> float:
            rows = size + 1 + num_others
            return expected_tokens(rate, size) / self.costs.cost(
                sequence, rows, [sequence.length], size
            )

        return max(range(self.max_size + 1), key=goodput)

    def observe(self, round: SpeculationRound) -> None:
        num_drafts = len(round.tree)
        self.costs.observe(round)
        if num_drafts:
            has_rejection = round.num_accepted < num_drafts
            self.accepted = self.memory * self.accepted + round.num_accepted
            self.rejected = self.memory * self.rejected + has_rejection


@register(
    Card(
        "bandit",
        "speculative",
        paper="EESD (arXiv:2406.03853), its Thompson sampling of the draft length",
        exactness="token-exact",
        summary="A bandit learns the draft length by Thompson sampling.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "any drafter; the paper's early exit with a trained layer is not included",
            "one rate is drawn per round, and the length with the most expected tokens per"
            " measured cost is used; the paper draws at every draft whether to continue",
            "the posterior decays; its calibration by the drafter's confidence is not included",
        ),
        remote={
            "drafter": Nested(),
            "max_drafts": Range(0, 64),
            "memory": Range(0, 1),
            "fixed": Range(0, 100),
            "per_row": Range(0, 100),
        },
    )
)
def bandit(
    drafter: str = "prompt-lookup",
    max_drafts: int = 8,
    memory: float = 0.95,
    fixed: float | None = None,
    per_row: float = 0.1,
) -> Speculative:
    """Draft lengths by Thompson sampling.

    Args:
        drafter: Key of the speculative method that drafts.
        max_drafts: Maximum draft length.
        memory: Decay of the counts per round, above 0 and at most 1.
        fixed: Fixed cost of a pass; if absent, all costs are measured.
        per_row: Cost per row.
    """
    if not 0 < memory <= 1:
        raise InvalidRequestError("bandit needs 0 < memory <= 1")
    costs = DraftCosts(user_cost(fixed, per_row))
    return Speculative(
        chain_drafter(drafter),
        max_drafts,
        budget=lambda sequence: BanditBudget(sequence, costs, max_drafts, memory),
    )

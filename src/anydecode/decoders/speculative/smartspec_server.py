"""SmartSpec for a server: the drafts of all requests share one budget, by the goodput of all.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv:2406.14066.

Before a round, a request drafts as many tokens as are expected to save time beside those of the
others. The drafted rows are optional: when the pass is planned, those of all its requests that save
time in it are kept (`engine/optional_rows.py`), by the same objective.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import DraftBudget, SpeculationRound, Speculative
from anydecode.errors import InvalidRequestError
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Acceptance rate of a draft before any was verified.
FIRST_RATE = 0.6
#: Weight of a round in the acceptance rate of its request, and in that of all requests, with which
#: new ones start; and in the seconds per draft.
OWN_RATE, SHARED_RATE, COST_RATE = 0.1, 0.02, 0.1


class DraftingRequests:
    """The requests of one server that draft, and what their drafts have cost.

    Args:
        max_drafts: Maximum number of drafts of a request per round.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.rate = FIRST_RATE
        self.running: dict[Sequence, SharedBudget] = {}
        self.seconds_per_draft = 0.0
        self._counts: dict[Sequence, int] = {}
        self._num_uses = 0

    def add(self, sequence: Sequence, budget: SharedBudget) -> None:
        """Let a request share the budget."""
        self.running[sequence] = budget
        self._counts = {}

    def remove(self, sequence: Sequence) -> None:
        """Take out a request that has ended, or whose decoding stops."""
        self.running.pop(sequence, None)
        self._counts = {}

    def count(self, sequence: Sequence) -> int:
        """The number of drafts of `sequence` with which the next pass over all requests is expected
        to bring the most tokens per second. Those of all requests are computed once per pass."""
        if sequence not in self._counts or self._num_uses >= len(self.running):
            self._counts, self._num_uses = self._useful_counts(sequence), 0
        self._num_uses += 1
        return self._counts[sequence]

    def _useful_counts(self, sequence: Sequence) -> dict[Sequence, int]:
        cost_model, running = sequence.cost_model, list(self.running)
        # Sequences of other decoders have one row each.
        num_tokens = max(len(running), cost_model.num_others() + 1)
        context = sum(one.length for one in running) // len(running)

        def cost(num_drafts: int) -> float:
            seconds = cost_model.seconds(num_tokens + num_drafts, context)
            return seconds + self.seconds_per_draft * num_drafts

        rates = [budget.rate for budget in self.running.values()]
        chances = [[rate**depth for depth in range(1, self.max_drafts + 1)] for rate in rates]
        return dict(zip(running, useful_counts(chances, num_tokens, cost), strict=True))

    def observe(self, round: SpeculationRound) -> None:
        """Update the moving average of the seconds per draft."""
        change = round.draft_seconds / len(round.tree) - self.seconds_per_draft
        self.seconds_per_draft += COST_RATE * change


class SharedBudget(DraftBudget):
    """The budget of one request: no more than its method's own budget, and than saves time beside
    the other requests."""

    def __init__(self, requests: DraftingRequests, own: DraftBudget) -> None:
        self.requests = requests
        self.own = own
        self.rate = requests.rate

    def size(self, sequence: Sequence) -> int:
        return min(self.requests.count(sequence), self.own.size(sequence))

    def chances(self, tree: TokenTree) -> Seq[float]:
        """Powers of the acceptance rate by depth, shared by siblings. Of rows that may be left out,
        the last ones are first, so that none counts more than one before it."""
        paths, found, least = {ROOT: 1.0}, list[float](), 1.0
        for node, parent in enumerate(tree.parents):
            paths[node] = paths[parent] * self.rate / len(tree.children(parent))
            least = min(least, paths[node])
            found.append(least)
        return found

    def observe(self, round: SpeculationRound) -> None:
        """Update the acceptance rates; rounds without drafts do not count."""
        self.own.observe(round)
        if not len(round.tree):
            return
        num_verified = min(len(round.tree), round.num_accepted + 1)
        rate = round.num_accepted / num_verified
        self.rate += OWN_RATE * (rate - self.rate)
        self.requests.rate += SHARED_RATE * (rate - self.requests.rate)
        self.requests.observe(round)


class SharedDrafts(Speculative):
    """`inner`, whose requests share the budget of `requests`."""

    def __init__(self, inner: Speculative, requests: DraftingRequests) -> None:
        super().__init__(inner.drafter, inner.size, inner.acceptance)
        self.inner, self.requests = inner, requests
        self.requirements = inner.requirements

    def budget(self, sequence: Sequence) -> DraftBudget:
        budget = SharedBudget(self.requests, self.inner.budget(sequence))
        self.requests.add(sequence, budget)
        return budget

    def prepare(self, sequence: Sequence) -> None:
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        try:
            yield from super().decode(sequence)
        finally:
            self.requests.remove(sequence)


@register(
    Card(
        "smartspec-server",
        "serving",
        paper="Liu et al. 2024, SmartSpec, arXiv:2406.14066",
        exactness="token-exact",
        use="LLM(drafting='smartspec-server') or anydecode serve --drafting smartspec-server",
        summary="The drafts of all requests share one budget, by the goodput of all.",
        deviations=(
            "every request has a draft length of its own (the paper: all have the same, or each its"
            " own), which is an upper bound: a method's own budget may draft less",
            "when a pass is planned, drafted rows that save no time in it are left out again; a"
            " node counts with the power of the acceptance rate by its depth, shared by siblings,"
            " and of a tree the last nodes are left out first",
            "costs are measured while the engine runs; the paper profiles them beforehand",
            "methods whose text depends on the drafts (rejection sampling, lossy acceptance) are"
            " not limited, so that no result depends on the load",
            "`auto`, whose drafted rows share the budget when passes are planned with or without"
            " this, and methods with a loop of their own (`jacobi`, `layerskip`, `pearl`,"
            " `saguaro`) are not limited",
        ),
    )
)
class ServerGoodput:
    """Wraps the speculative decoders of one server so that their requests share one budget.

    Args:
        max_drafts: Maximum number of drafts of a request per round.
    """

    def __init__(self, max_drafts: int = 8) -> None:
        if max_drafts < 1:
            raise InvalidRequestError(
                f"max_drafts is {max_drafts}; smartspec-server needs 1 or more"
            )
        self.requests = DraftingRequests(max_drafts)

    def over(self, decoder: Decoder) -> Decoder:
        """`decoder` with the shared budget, or `decoder` itself if it has no draft budget."""
        if not isinstance(decoder, Speculative) or type(decoder.acceptance) is not TokenExact:
            return decoder
        if type(decoder).decode is not Speculative.decode:
            return decoder
        return SharedDrafts(decoder, self.requests)

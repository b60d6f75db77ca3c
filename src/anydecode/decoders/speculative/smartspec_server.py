"""SmartSpec for a server: the drafts of all requests share one budget, by the goodput of all.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv:2406.14066.

Before a round, a request beside others drafts as many levels as are expected to save time beside
the drafts of the others. The drafted rows are optional: when the pass is planned, those of all its
requests that save time in it are kept (`engine/optional_rows.py`), by the same objective. A request
alone drafts as its method says.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.speculation import MAX_UNDRAFTED
from anydecode.errors import InvalidRequestError
from anydecode.scoring.draft_policy import DraftedSequence
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.tree import ROOT, TokenTree

#: Depths, and ranks among siblings, with a rate of their own; later ones have that of the last.
NUM_DEPTHS, NUM_RANKS = 4, 8
#: Rates before anything was verified, by rank: high ones, so that every source is tried, and tried
#: again when its counts have faded. The last one is that of any child.
FIRST_RATES = np.array([*(0.5**rank for rank in range(NUM_RANKS)), 1.0])
#: Rounds in which the counts of a request, and those of all requests of its source, fade to 1/e,
#: and the drafts of the request that count as much as all of its source.
OWN_ROUNDS, SHARED_ROUNDS, SHARED_WEIGHT = 32, 256, 4
#: Weights of a round in the average of the seconds per level: of one that takes longer, which may
#: include other work of the machine, and of one that takes less.
SLOWER_RATE, FASTER_RATE = 0.1, 0.5


class AcceptanceCounts:
    """How often a draft was accepted where the one before it was, by its depth and its rank among
    its siblings, and by depth how often any child was.

    Args:
        num_rounds: Rounds in which counts fade to 1/e.
    """

    def __init__(self, num_rounds: int) -> None:
        self.fading = 1 - 1 / num_rounds
        self.tested = np.zeros((NUM_DEPTHS, NUM_RANKS + 1))
        self.accepted = np.zeros_like(self.tested)

    def record(self, tree: TokenTree, path: Seq[int]) -> None:
        """Add a verified draft, which may be empty."""
        self.tested *= self.fading
        self.accepted *= self.fading
        for depth, node in enumerate([ROOT, *path]):
            children, row = tree.children(node), min(depth, NUM_DEPTHS - 1)
            if children:
                self.tested[row, NUM_RANKS] += 1
                self.accepted[row, NUM_RANKS] += depth < len(path)
            for rank, child in enumerate(children):
                column = min(rank, NUM_RANKS - 1)
                self.tested[row, column] += 1
                self.accepted[row, column] += depth < len(path) and child == path[depth]

    def rates(self, first: np.ndarray | None, weight: float) -> np.ndarray:
        """The rates by depth and rank, float64 `[NUM_DEPTHS, NUM_RANKS + 1]`.

        Args:
            first: Rates that count as `weight` drafts each; None: those of the depth before, and
                `FIRST_RATES`.
            weight: Their weight.
        """
        if first is not None:
            return (self.accepted + weight * first) / (self.tested + weight)
        found, before = np.empty_like(self.tested), FIRST_RATES
        for depth, (tested, accepted) in enumerate(zip(self.tested, self.accepted, strict=True)):
            found[depth] = before = (accepted + weight * before) / (tested + weight)
        return found


class SourceRates:
    """What is known of the drafts of one source: how often they are accepted, and the seconds that
    a level of a draft takes."""

    def __init__(self) -> None:
        self.counts = AcceptanceCounts(SHARED_ROUNDS)
        self.seconds_per_level = 0.0

    def record_seconds(self, per_level: float) -> None:
        """Add those of a level of a draft."""
        rate = SLOWER_RATE if per_level > self.seconds_per_level else FASTER_RATE
        self.seconds_per_level += rate * (per_level - self.seconds_per_level)

    def forget_seconds(self) -> None:
        """Let them fade in a round without a draft, so that drafts which were left out for their
        time are tried again."""
        self.seconds_per_level *= self.counts.fading

    def rates(self) -> np.ndarray:
        """As of `AcceptanceCounts`."""
        return self.counts.rates(None, 1.0)


class ServerShare:
    """The drafts of one request: no more than its method says, and beside other requests no more
    than saves time."""

    def __init__(
        self, server: ServerGoodput, sequence: DraftedSequence, source: SourceRates
    ) -> None:
        self.server = server
        self.sequence = sequence
        self.source = source
        self.counts = AcceptanceCounts(OWN_ROUNDS)
        self.can_burst = False
        self.is_chain, self.num_levels = True, 0  # of the last draft
        self.num_whole_rows = 0  # of the last draft, if no pass may leave out rows of it
        self._has_drafted = False
        self._rates: np.ndarray | None = None

    @property
    def rates(self) -> np.ndarray:
        """The acceptance rates of this request's drafts."""
        if self._rates is None:
            self._rates = self.counts.rates(self.source.rates(), SHARED_WEIGHT)
        return self._rates

    def size(self, own: int, can_burst: bool = False) -> int:
        self.can_burst = can_burst
        if not own or not self.sequence.cost_model.num_others():
            return own
        count = self.server.count(self)
        if self.num_whole_rows:
            return own if 2 * count > self.num_whole_rows else 0
        return min(own, count) if self.is_chain else own if count else 0

    def levels(self, max_levels: int) -> list[float]:
        """The probability that each level of a draft has an accepted node, or of a draft that runs
        whole the expected number of accepted nodes, spread over its rows."""
        rates = self.rates[:, NUM_RANKS]
        paths = np.cumprod([rates[min(level, NUM_DEPTHS - 1)] for level in range(max_levels)])
        if self.num_whole_rows:
            gain = float(paths[: self.num_levels].sum())
            return [gain / self.num_whole_rows] * self.num_whole_rows
        found: list[float] = paths.tolist()
        return found

    def chances(self, tree: TokenTree) -> Seq[float]:
        if not self.sequence.cost_model.num_others():
            return ()
        rates = self.rates.tolist()
        ranks, found = dict[int, int](), list[float]()
        for depth, parent in zip(tree.depths(), tree.parents, strict=True):
            rank = ranks.get(parent, 0)
            ranks[parent] = rank + 1
            rate = rates[min(depth, NUM_DEPTHS) - 1][min(rank, NUM_RANKS - 1)]
            found.append(rate if parent == ROOT else rate * found[parent])
        return found

    def observe(
        self, tree: TokenTree, path: Seq[int], seconds: float, is_whole: bool = False
    ) -> None:
        self._rates = None
        self.counts.record(tree, path)
        self.source.counts.record(tree, path)
        if not len(tree):
            self.source.forget_seconds()
            return
        self.is_chain = tree.is_chain
        self.num_levels = max(tree.depths())
        self.num_whole_rows = len(tree) if is_whole else 0
        if self._has_drafted:  # in the first draft a draft model has read the prompt, too
            self.source.record_seconds(seconds / self.num_levels)
        self._has_drafted = True

    def close(self) -> None:
        self.server.remove(self)


@register(
    Card(
        "smartspec-server",
        "serving",
        paper="Liu et al. 2024, SmartSpec, arXiv:2406.14066",
        exactness="token-exact",
        use="the default; LLM(drafting='fixed') or anydecode serve --drafting fixed: without it",
        summary="The drafts of all requests share one budget, by the goodput of all.",
        deviations=(
            "every request has a draft length of its own (the paper: all have the same, or each its"
            " own), which is an upper bound: a method's own budget may draft less",
            "a request that runs alone drafts as its method says; one beside others that drafts"
            " nothing generates up to 8 tokens per call, unless its method learns from each pass",
            "when a pass is planned, drafted rows that save no time in it are left out again, the"
            " least probable ones first",
            "acceptance rates are by depth and by rank among siblings, of the request and of all"
            " requests of its method; the paper has one moving average. They begin as if every"
            " first sibling were accepted, so that each method is tried, and tried again later",
            "costs are measured while the engine runs; the paper profiles them beforehand",
            "methods whose text depends on the drafts (rejection sampling, lossy acceptance) are"
            " not limited, so that no result depends on the load",
            "drafts whose rows a method needs all (`lookahead`, `ppd`), and those of methods that"
            " verify in other ways (`pearl`, `saguaro`, early exits), are left out before they are"
            " made, or not at all",
            "drafting beside the target on one device counts with half of the time in which both"
            " run, since they share its cores",
            "`auto` has rates of its own, and its rows are planned together with the others",
        ),
    )
)
class ServerGoodput:
    """Limits the drafts of all requests of one server together. An `LLM` that it is given to takes
    an `unused` one of its own, since requests of different engines share no passes.

    Args:
        max_drafts: Maximum number of levels of a draft beside other requests.

    Raises:
        InvalidRequestError: `max_drafts` is less than 1.
    """

    def __init__(self, max_drafts: int = 8) -> None:
        if max_drafts < 1:
            raise InvalidRequestError(
                f"max_drafts is {max_drafts}; smartspec-server needs 1 or more"
            )
        self.max_drafts = max_drafts
        self.running: dict[ServerShare, None] = {}
        self._sources: WeakKeyDictionary[object, SourceRates] = WeakKeyDictionary()
        self._counts: dict[ServerShare, int] = {}
        self._num_uses = 0

    def unused(self) -> ServerGoodput:
        """The same limit without requests."""
        return type(self)(self.max_drafts)

    def open(self, sequence: DraftedSequence, source: object) -> ServerShare:
        """See `DraftPolicy`."""
        share = self.share(sequence, self._sources.setdefault(source, SourceRates()))
        self.running[share] = None
        self._counts = {}
        return share

    def share(self, sequence: DraftedSequence, source: SourceRates) -> ServerShare:
        """The share of a request, which is not running yet."""
        return ServerShare(self, sequence, source)

    def remove(self, share: ServerShare) -> None:
        """Take out a request that has ended, or whose decoding stops."""
        self.running.pop(share, None)
        self._counts = {}

    def count(self, share: ServerShare) -> int:
        """The number of levels (of a draft that runs whole: of rows) of a request's draft with
        which the next pass over all requests is expected to bring the most tokens per second. Those
        of all requests are computed once per pass."""
        if share not in self._counts or self._num_uses >= len(self.running):
            self._counts, self._num_uses = self._useful_counts(share.sequence), 0
        self._num_uses += 1
        return self._counts[share]

    def _useful_counts(self, sequence: DraftedSequence) -> dict[ServerShare, int]:
        running = list(self.running)
        # Sequences of other decoders have one row each.
        num_tokens = max(len(running), sequence.cost_model.num_others() + 1)
        context = sum(share.sequence.length for share in running) // len(running)
        levels = [share.levels(self.max_drafts) for share in running]
        max_rows = max(self.max_drafts, *map(len, levels)) * len(running)
        costs = sequence.cost_model.pass_seconds(num_tokens, max_rows, context)
        undrafted = costs[0]
        if all(share.can_burst for share in running):
            # What the engine takes beside a pass, it takes once for several passes without drafts.
            saved = (1 - 1 / MAX_UNDRAFTED) * sequence.cost_model.host_seconds(num_tokens)
            undrafted = max(0.5 * undrafted, undrafted - saved)
        rate = num_tokens / undrafted
        chances = []
        for share, found in zip(running, levels, strict=True):
            # Drafting takes the time in which others would get so many tokens.
            drafting = share.source.seconds_per_level * rate
            chances.append([one - drafting for one in found if one > drafting])
        counts = useful_counts(
            chances, num_tokens, lambda count: costs[count] if count else undrafted
        )
        return dict(zip(running, counts, strict=True))

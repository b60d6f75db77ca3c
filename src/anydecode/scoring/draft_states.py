"""The states that a drafter reads of the target of one sequence (EAGLE, DFlash and their kind).

The row of EAGLE's drafter at position p reads the target's state at position p - 1 (`StateSpec.lag`
is 1; of the further modules of MiMo-V2 it is more, so that they need no other states). Where the
target has not computed it, because the token there is a draft, the drafter's own state of that row
stands in; such rows are computed again once the target's states are known. The
context of a block drafter (lag 0) has the target's state of each position, and no others.
LongSpec's drafter reads the state of a row's own position (lag 0); rows without one, of draft
tokens and of the text's last token, have zeros, which no row attends to (`Span.context`). Positions
without a state (the first one with lag 1, and those that the target took from its prefix cache) are
left out of the drafter's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from typing import Any, Protocol

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import StateSpec
from anydecode.scoring.span import ChainSpan, CompletionSpan, Span, TreeSpan
from anydecode.scoring.tree import ROOT

#: Maximum number of rows of one span whose states are kept for a drafter, which leaves earlier
#: positions of a longer prompt out. Bounds the memory of a prompt's states.
MAX_STATES = 2048


class StateReader(Protocol):
    """A drafter that reads states: see `Transformer`."""

    def project_states(self, taps: list[np.ndarray]) -> np.ndarray: ...

    def own_states(self, hidden: np.ndarray) -> np.ndarray: ...


class DraftStates:
    """States by position, and by node of a pending token tree.

    Args:
        spec: What the drafter reads.
        drafter: The drafter.
        depth: The target's number of layers.
        normed: The target's final norm, of states float32 `[rows, norm_size]`.
        norm_size: The numbers that it reads of a state; None: `target_size`.

    Attributes:
        layers: The target's hidden states that are read, by number of layers.
        reads_tokens: See `StateSpec`.
        stride: See `StateSpec`.
        lag: See `StateSpec`.
        has_own: Whether the drafter's own states stand in for those of the target.
        confirmed: Leading positions of the drafter's cache that were computed from the target's
            states; None while it has no cache.
        is_paused: Whether the target's passes leave their states out, since no drafts are wanted.
        chains: See `BurstDrafter`; None if the drafter does not draft in multi-step passes.
    """

    def __init__(
        self,
        spec: StateSpec,
        drafter: StateReader,
        depth: int,
        normed: Callable[[np.ndarray], np.ndarray],
        norm_size: int | None = None,
    ) -> None:
        self._drafter, self._normed = drafter, None if spec.taps else normed
        self._width = spec.num_taps * spec.target_size
        self._read_size = spec.target_size if spec.taps else norm_size or spec.target_size
        self._num_taps, self.reads_tokens = spec.num_taps, spec.reads_tokens
        self.stride, self.lag = spec.stride, spec.lag
        self.has_own = spec.lag == 1 and not spec.has_mask
        self._is_cross = spec.joins == "cross"
        self.layers = spec.taps or (depth,)
        self.is_paused = False
        self.chains: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, after the caches were released."""
        self.confirmed: int | None = None
        self._first = 0  # position of the first row of `_target`
        self._target = np.empty((0, self._width), np.float32)
        self._target_nodes = self._target
        self._own: dict[int, np.ndarray] = {}  # by position
        self._own_nodes: list[np.ndarray] = []

    def fork(self) -> DraftStates:
        """A copy for a branch of the sequence."""
        branch = copy(self)
        branch._own, branch._own_nodes = dict(self._own), list(self._own_nodes)
        return branch

    # --- after passes of the target

    def observe_target(self, span: Span, first: int, states: list[np.ndarray]) -> None:
        """Take the states of rows of `span` from row `first` on, float32 `[rows, target_size]` per
        layer of `layers`."""
        # Of several streams the first, unless the norm reads all, and no memory.
        rows = np.concatenate([tap[:, : self._read_size] for tap in states], -1)
        if isinstance(span, ChainSpan):
            self._put(span.first_position + first, rows)
        elif isinstance(span, CompletionSpan) and span.partial is not None:
            self._put(span.partial.start + first, rows)
        elif isinstance(span, TreeSpan):
            kept = self._target_nodes[: span.first] if span.first else rows[:0]
            self._target_nodes = np.concatenate([kept, rows])

    def accept(self, path: Seq[int], position: int) -> None:
        """The nodes of `path` of the target's tree have become the positions from `position` on."""
        if len(path) and max(path) < len(self._target_nodes):
            self._put(position, self._target_nodes[np.asarray(path)])
        self._target_nodes = self._target_nodes[:0]

    def _put(self, position: int, rows: np.ndarray) -> None:
        kept = position - self._first
        if not 0 < kept <= len(self._target):
            self._first, self._target = position, rows
        else:
            self._target = np.concatenate([self._target[:kept], rows])

    def knows(self, position: int) -> bool:
        """Whether the target's state at `position` is known."""
        return self._first <= position < self._first + len(self._target)

    def known(self, position: int) -> np.ndarray:
        """The target's states at `position`, float32 `[taps * target_size]`, side by side, which
        are known."""
        taps = self._target[position - self._first][None]
        return (taps if self._normed is None else self._normed(taps))[0]

    def can_draft(self, length: int) -> bool:
        """Whether the states are known that the last rows of a text of `length` tokens read."""
        return self.knows(length - 2) and self.knows(length - 1 - self.stride)

    def truncate(self, length: int) -> None:
        """Forget the target's states from position `length` on: its cache has no more positions."""
        self._target = self._target[: max(0, length - self._first)]

    # --- before and after passes of the drafter

    def align(self, kv_cache: SequenceCache) -> None:
        """Drop the positions of the drafter's cache that were computed from its own states."""
        if self.confirmed is None:
            self.confirmed = kv_cache.length
        self.confirmed = min(self.confirmed, kv_cache.length)
        kv_cache.truncate(self.confirmed)
        self._own, self._own_nodes = {}, []

    def skip(self, kv_cache: SequenceCache, tokens: Seq[int]) -> Seq[int]:
        """Leave out the first of `tokens` in the drafter's cache, which they are to be appended to,
        as far as there is no state for them. Returns the others."""
        first = kv_cache.length
        if self.confirmed is None:
            self.confirmed = first
        count = len(tokens)
        while count > 0 and self._has(first + count - 1):
            count -= 1
        if count == len(tokens):
            raise UnsupportedCombinationError(
                "this drafter reads the target's states, which are not known yet"
            )
        if count:
            kv_cache.skip(tokens[:count], max(1, self.lag))
            if self.confirmed == first:
                self.confirmed = kv_cache.length
        return tokens[count:]

    def unread(
        self, kv_cache: SequenceCache, tokens: Seq[int], limit: int
    ) -> tuple[Seq[int], np.ndarray]:
        """What the drafter is to read next, for `BurstDrafter`: the last of `tokens`, which follow
        in its cache, at most `limit`, before which the target's states are known, and these states,
        float32 `[tokens, taps * target_size]`. Earlier tokens are left out of its cache. `align`
        comes before."""
        count = len(tokens) - self.num_readable(kv_cache.length, len(tokens), limit)
        if count:
            kv_cache.skip(tokens[:count])
            self.confirmed = kv_cache.length
        tokens, start = tokens[count:], kv_cache.length - self.lag - self._first
        return tokens, self._target[max(0, start) :][: len(tokens)]

    def num_readable(self, first: int, count: int, limit: int) -> int:
        """The number of the last of `count` tokens from position `first` on, at most `limit`,
        before which the target's states are known."""
        num = 0
        while num < min(count, limit) and self.knows(first + count - 1 - num - self.lag):
            num += 1
        return num

    def keep(self, first: int, num_read: int, states: np.ndarray) -> None:
        """Take what a multi-step pass has computed: the drafter has read `num_read` positions from
        `first` on, before which and before those that follow the target's states were `states`,
        float32 `[positions, taps * target_size]`."""
        self.confirmed = first + num_read
        self._first = self.confirmed - self.lag
        self._target = states[num_read:].copy()

    @property
    def context(self) -> int | None:
        """The number of positions before which the target's states are known, if the drafter
        attends to these alone; else None."""
        return self._first + len(self._target) if self._is_cross else None

    def _has(self, position: int) -> bool:
        source = position - self.lag
        if self._is_cross and position >= self._first + len(self._target) > self._first:
            return True  # a row of a token alone
        if source >= 0 and (self.knows(source) or source in self._own):
            return True
        return not self.reads_tokens and position > self._first + len(self._target) > self._first

    def for_chain(self, first: int, count: int) -> np.ndarray:
        """The states of the drafter's rows at the positions from `first` on, float32 `[count,
        hidden_size]`. Rows from the target's states are confirmed, and these are freed."""
        lag = self.lag
        num_known = max(0, min(count, self._first + len(self._target) + lag - first))
        parts = []
        if num_known:
            start = first - lag - self._first
            taps = self._target[start : start + num_known]
            parts.append(self._project(taps))
            if self.confirmed == first:
                self.confirmed = first + num_known
                num_freed = max(0, start + num_known - max(self.stride, lag))
                self._target = self._target[num_freed:]
                self._first += num_freed
        if num_known < count and self._is_cross:
            parts.append(np.zeros((count - num_known, self._width), np.float32))
        elif num_known < count:
            positions = range(first + num_known, first + count)
            if self.reads_tokens or not num_known:
                parts.append(np.stack([self._own[position - lag] for position in positions]))
            else:
                parts += self._following(parts[0][-1:], len(positions))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _following(self, state: np.ndarray, count: int) -> list[np.ndarray]:
        """The `count` states behind `state`, float32 `[1, hidden_size]`, whatever is drafted."""
        rows = []
        for _ in range(count):
            state = self._drafter.own_states(state)
            rows.append(state)
        return rows

    def for_nodes(self, kv_cache: SequenceCache, parents: Seq[int]) -> np.ndarray:
        """The states of new nodes of the drafter's tree, float32 `[nodes, hidden_size]`: its own
        states of the nodes `stride` before them (of their parents), which must have run."""
        if self._is_cross:
            return np.zeros((len(parents), self._width), np.float32)
        pending = [] if kv_cache.pending is None else kv_cache.pending.parents
        tree, last = [*pending, *parents], kv_cache.length - 1
        return np.stack(
            [self._own_before(tree, node, last) for node in range(len(pending), len(tree))]
        )

    def _own_before(self, parents: Seq[int], node: int, last: int) -> np.ndarray:
        """The drafter's own state of what is `stride` before `node`: a node, or a position up to
        `last`."""
        for step in range(1, self.stride + 1):
            node = parents[node]
            if node == ROOT:
                return self._own[last - self.stride + step]
        return self._own_nodes[node]

    def observe_draft(self, span: Span, rows: Seq[int], hidden: np.ndarray) -> None:
        """Take the drafter's last hidden states of `rows` of `span`, float32 `[rows,
        hidden_size]`."""
        states = self._drafter.own_states(hidden)
        if isinstance(span, TreeSpan):
            del self._own_nodes[span.first + rows[0] :]
            self._own_nodes += list(states)
        elif isinstance(span, ChainSpan):
            self._own |= {span.first_position + row: s for row, s in zip(rows, states, strict=True)}

    def _project(self, taps: np.ndarray) -> np.ndarray:
        if self._normed is not None:
            taps = self._normed(taps)
        return self._drafter.project_states(np.split(taps, self._num_taps, -1))

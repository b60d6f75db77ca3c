"""The states that a drafter reads, against a table of states by position."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydecode.errors import UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import StateSpec
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.span import ChainSpan, TreeSpan

#: What a target of one number per state returns at a position: twice that number.
TARGET = 2.0


class _Drafter:
    """Multiplies the target's states by 10; its own states are negative positions."""

    def project_states(self, taps: list[np.ndarray]) -> np.ndarray:
        return cast(np.ndarray, 10 * taps[0])

    def own_states(self, hidden: np.ndarray) -> np.ndarray:
        return -hidden


class _Cache:
    """A drafter's cache: positions, of which some are left out."""

    def __init__(self) -> None:
        self.length, self.left_out = 0, 0
        self.pending = None

    def truncate(self, length: int) -> None:
        self.length = length

    def skip(self, tokens: list[int], num_always: int = 1) -> None:
        self.length += len(tokens)
        self.left_out += len(tokens)


def _chain(first: int, count: int) -> ChainSpan:
    return cast(ChainSpan, _span(ChainSpan, first_position=first, tokens=[0] * count))


def _tree(first: int) -> TreeSpan:
    return cast(TreeSpan, _span(TreeSpan, first=first))


def _span(kind: type, **fields: Any) -> Any:
    class _Span(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    for name, value in fields.items():
        setattr(_Span, name, value)
    return _Span()


def _states() -> DraftStates:
    return DraftStates(StateSpec((1,), 1), _Drafter(), 2, lambda taps: taps)


def _rows(positions: range) -> list[np.ndarray]:
    return [np.array([[TARGET * position] for position in positions], np.float32)]


def _draft(states: DraftStates, cache: _Cache, known: int, ahead: int) -> None:
    """Rounds of a drafter: the positions up to `known + 1`, then `ahead` more one by one. Checks
    what each row reads."""
    states.align(cast(SequenceCache, cache))
    for length in range(known + 1, known + 1 + ahead + 1):
        tokens = list(states.skip(cast(SequenceCache, cache), [0] * (length - cache.length)))
        first, count = cache.length, len(tokens)
        expected = [
            10 * TARGET * (position - 1) if position <= known else -position + 1
            for position in range(first, first + count)
        ]
        assert states.for_chain(first, count)[:, 0].tolist() == expected
        own = np.array([[position] for position in range(first, first + count)], np.float32)
        states.observe_draft(_chain(first, count), range(count), own)
        cache.length += count


@given(st.data())
def test_rows_read_the_states_before_them(data: st.DataObject) -> None:
    """Chunks, chains, accepted paths of trees, and branches, in any order."""
    states, cache = _states(), _Cache()
    skipped = data.draw(st.integers(0, 5), "positions from the target's cache")
    known = skipped
    for _ in range(data.draw(st.integers(1, 6), "rounds")):
        count = data.draw(st.integers(1, 4), "rows")
        if data.draw(st.booleans(), "tree"):
            path = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=4), "path"))
            nodes = np.full((4, 1), np.nan, np.float32)
            nodes[path, 0] = [TARGET * (known + index) for index in range(len(path))]
            states.observe_target(_tree(0), 0, [nodes[:2]])
            states.observe_target(_tree(2), 0, [nodes[2:]])
            states.accept(path, known)
            known += len(path)
        else:
            states.observe_target(_chain(known, count), 0, _rows(range(known, known + count)))
            known += count
        if data.draw(st.booleans(), "branch"):
            _draft(states.fork(), _copy(cache), known, 2)
        if data.draw(st.booleans(), "draft"):
            _draft(states, cache, known, data.draw(st.integers(0, 3), "ahead"))
            assert states.confirmed == known + 1
            assert cache.left_out == skipped + 1


def _copy(cache: _Cache) -> _Cache:
    other = _Cache()
    other.length, other.left_out = cache.length, cache.left_out
    return other


def test_rows_of_a_tree_read_the_states_of_their_parents() -> None:
    states, cache = _states(), _Cache()
    states.observe_target(_chain(0, 3), 0, _rows(range(3)))
    _draft(states, cache, 3, 0)
    reader = cast(SequenceCache, cache)
    assert states.for_nodes(reader, [-1, -1])[:, 0].tolist() == [-3, -3]
    states.observe_draft(_tree(0), range(2), np.array([[41.0], [42.0]], np.float32))
    assert states.for_nodes(reader, [1, 0, -1])[:, 0].tolist() == [-42, -41, -3]


def test_without_states_of_the_target_nothing_is_drafted() -> None:
    states = _states()
    with pytest.raises(UnsupportedCombinationError, match="not known yet"):
        states.skip(cast(SequenceCache, _Cache()), [0, 0])


def test_states_behind_the_targets_cache_are_forgotten() -> None:
    states = _states()
    states.observe_target(_chain(0, 4), 0, _rows(range(4)))
    states.truncate(2)
    assert states.knows(1) and not states.knows(2)

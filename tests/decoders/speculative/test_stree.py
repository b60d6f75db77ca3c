"""STree: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.decoders.speculative import stree
from anydecode.errors import InvalidRequestError
from anydecode.kernels import recurrent
from anydecode.kernels.recurrent import PassStates, Scan
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("stree")


def test_certificate_rejects_branches_that_start_from_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "branch_state", lambda number: -1)
    assert_rejected("stree")


@pytest.mark.slow
def test_certificate_rejects_branches_that_compute_the_states_before_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan = PassStates.scan

    def row_by_row(states: PassStates, active: Any) -> Scan:
        parts = [scan(states, np.array([row])) for row in active]
        first = np.cumsum([0, *(len(part.slots) for part in parts)]).astype(np.int32)
        slots, saves = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("slots", "saves")
        )
        rows = [
            np.where(part.rows < 0, -1, member).astype(np.int32)
            for member, part in enumerate(parts)
        ]
        start = np.concatenate([part.start for part in parts])
        return Scan(parts[0].lead, start, first, slots, np.concatenate(rows), saves)

    monkeypatch.setattr(PassStates, "scan", row_by_row)
    assert_rejected("stree")


@pytest.mark.slow
def test_certificate_rejects_sizes_without_the_cost_of_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stree, "replay_cost", lambda model: 0.0)
    assert_rejected("stree")


@pytest.mark.slow
def test_certificate_rejects_trees_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "stree", "suffix")
    assert_rejected("stree")


@pytest.mark.slow
def test_certificate_rejects_another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "stree", size=8)
    assert_rejected("stree")


@pytest.mark.parametrize(("num_others", "size"), [(0, 7), (3, 4), (7, 0)])
def test_sequences_in_company_draft_as_many_nodes_as_cost_nothing(
    num_others: int, size: int
) -> None:
    """Passes of up to eight rows take equally long, and each further row as long again."""
    costs = SimpleNamespace(
        seconds=lambda rows, context: float(max(1, rows - 7)), num_others=lambda: num_others
    )
    sequence: Any = SimpleNamespace(cost_model=costs, all_tokens=[1] * 10)
    assert stree.ReplayBudget(16, replay=0.0).size(sequence) == size


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="replay >= 0"):
        stree.STree(replay=-1.0)

"""Token recycling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.oracles.speculative import token_recycling as oracle
from anydecode.certification.rounds import accepted, rounds, scripted, wordy
from anydecode.decoders.speculative import token_recycling
from anydecode.decoders.speculative.static_trees import WorthwhileTree
from anydecode.decoders.speculative.token_recycling import TokenRecyclingDrafter
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


def test_certificate() -> None:
    assert_certified("token-recycling")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "token-recycling", "prompt-lookup")
    assert_rejected("token-recycling")


@pytest.mark.parametrize("row_cost", [0.0, 0.1])
def test_certificate_rejects_the_same_tree_at_any_cost(
    monkeypatch: pytest.MonkeyPatch, row_cost: float
) -> None:
    replace_defaults(monkeypatch, "token-recycling", row_cost=row_cost)
    assert_rejected("token-recycling")


def test_certificate_rejects_rates_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorthwhileTree, "rates", property(lambda self: self.priors))
    assert_rejected("token-recycling")


def test_certificate_rejects_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaf hangs on another node of its level, in the tree that is filled and in the oracle's
    copy."""
    tree = [*token_recycling.PUBLISHED[:-1], (0, 0, 0, 0, 1, 0)]
    for module in (token_recycling, oracle):
        monkeypatch.setattr(module, "PUBLISHED", tree)
    assert_rejected("token-recycling")


def test_matrix_keeps_the_last_of_equal_tokens() -> None:
    drafter = TokenRecyclingDrafter(WorthwhileTree([(0,)], [0.5]))
    drafter.successors.update(zip([4, 4], [[1], [2]], strict=True))
    assert drafter.successors[4] == [2]


def test_clear_resets_learned_drafts() -> None:
    with scripted(wordy()) as llm:
        cold, warm = (accepted(rounds(llm, "token-recycling", "hbhb")) for _ in range(2))
        llm.clear()
        again = accepted(rounds(llm, "token-recycling", "hbhb"))
    assert warm > cold == again

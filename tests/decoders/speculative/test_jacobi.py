"""Jacobi decoding passes its certificate; wrong iterations do not."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative import jacobi
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("jacobi")


def test_an_iterate_without_the_noise_of_its_positions_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def greedy(sequence: Sequence, scores: Scores, num_accepted: int) -> list[int]:
        return [int(scores.logits[row].argmax()) for row in range(num_accepted + 1, len(scores))]

    monkeypatch.setattr(jacobi, "_next", greedy)
    assert_rejected("jacobi")


def test_an_iterate_that_is_one_position_late_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(sequence: Sequence, scores: Scores, num_accepted: int) -> list[int]:
        return [scores.sample(row) for row in range(num_accepted, len(scores) - 1)]

    monkeypatch.setattr(jacobi, "_next", late)
    assert_rejected("jacobi")


def test_blocks_of_another_size_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    size = jacobi.Jacobi._block_size
    monkeypatch.setattr(jacobi.Jacobi, "_block_size", lambda *given: min(4, size(*given)))
    assert_rejected("jacobi")

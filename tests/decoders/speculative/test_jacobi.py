"""Jacobi decoding passes its certificate; wrong iterations do not. Iterates that are scored in
part."""

from __future__ import annotations

from itertools import cycle

import pytest

from anydecode.certification.rounds import accepted, plain_token, rounds, scripted, wordy
from anydecode.decoders.speculative import jacobi
from anydecode.scoring.draft_policy import OwnDrafts
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_predictions_that_are_not_scored_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Beside other requests a pass may have some rows of a block only, here five and one in
    turn."""
    limits, logits, length = cycle((5, 1)), wordy(), 24
    monkeypatch.setattr(OwnDrafts, "size", lambda self, own, *_: min(next(limits), own))
    with scripted(logits) as llm:
        trace = rounds(llm, "jacobi:block=8", "abcabcabd", length, temperature=temperature)
    assert accepted(trace)
    first = len(trace[0].text)
    iterate, block_end = list[int](), first
    for one, limit in zip(trace, cycle((5, 1)), strict=False):
        at = len(one.text)
        if at >= block_end:
            block_end = min(at + 8, first + length)
            iterate = one.text[-1:] * (block_end - at - 1)
        scored = iterate[: min(limit, block_end - at - 1)]
        assert one.tokens == scored
        predicted = [
            plain_token(logits((*one.text, *scored[:count])), at + count, temperature)
            for count in range(len(scored) + 1)
        ]
        iterate = predicted[len(one.generated) :] + iterate[len(scored) + 1 :]

"""Speculative sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.rounds import VirtualClock, blurred, rounds, scripted, wordy
from anydecode.decoders.speculative import draft_model
from certificates import assert_certified, assert_rejected

TARGET, DRAFT = wordy(), blurred(wordy())


def test_certificate() -> None:
    assert_certified("speculative-sampling")


def test_certificate_rejects_greedy_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = draft_model.fit_vocab
    monkeypatch.setattr(draft_model, "fit_vocab", lambda sequence, row: 100 * fit(sequence, row))
    assert_rejected("speculative-sampling")


def test_sequential_drafting_has_no_overlap() -> None:
    """The clock that measures overlap measures none for sequential drafting."""
    with scripted(TARGET, DRAFT) as llm:
        clock = VirtualClock(llm, target=4.0, draft=1.0)
        rounds(llm, "speculative-sampling", "abc")
    assert len(clock.passes) > 10 and clock.overlap == 0

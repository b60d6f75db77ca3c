"""Drafting in parallel: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.parallel_draft import ParallelDraft
from certificates import assert_certified, assert_rejected, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("parallel-draft")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "parallel-draft", "speculative-sampling")
    assert_rejected("parallel-draft")


def test_certificate_rejects_pre_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ParallelDraft.__init__
    monkeypatch.setattr(
        ParallelDraft, "__init__", lambda self, size=4: made(self, size, pre_verify=True)
    )
    assert_rejected("parallel-draft")

"""PEARL: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.certification.oracles.speculative.draft_chains import TARGET, recorded_drafts
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import scripted
from anydecode.decoders.framework import draft_time
from anydecode.decoders.speculative.pearl import Pearl
from anydecode.scoring.tree import TokenTree
from certificates import (
    assert_certified,
    assert_rejected,
    ignore_parameter,
    replace_defaults,
    replace_method,
)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("pearl")


def test_certificate_rejects_post_verify_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "pearl", pre_verify=False)
    assert_rejected("pearl")


def test_certificate_rejects_a_fixed_draft_length(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "pearl", size=4)
    assert_rejected("pearl")


def test_certificate_rejects_the_time_of_all_drafts_as_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Pearl._record_drafts
    monkeypatch.setattr(
        Pearl, "_record_drafts", lambda self, count, seconds: record(self, min(count, 1), seconds)
    )
    assert_rejected("pearl")


def test_with_another_rule_no_length_depends_on_measured_times() -> None:
    for rule, is_fixed in (("rejection", True), ("typical", True), ("token-exact", False)):
        assert (Pearl(acceptance=rule).size == 4) == is_fixed
        assert Pearl(size=7, acceptance=rule).size == 7


def test_certificate_rejects_drafts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "pearl", "speculative-sampling")
    assert_rejected("pearl")


def test_certificate_rejects_pre_verification_in_every_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignore_parameter(monkeypatch, "pearl", "pre_verify")
    assert_rejected("pearl")


def test_certificate_rejects_a_first_draft_ahead_that_is_never_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain sampling after the verified drafts, kept with drafts made for another token."""

    def accept(self: Pearl, tree: TokenTree, ahead: TokenTree, scores: Any) -> Any:
        result = self.acceptance.walk(tree, scores)
        if len(result.path) == len(tree) and len(ahead):
            result.tokens[-1] = ahead.tokens[0]
        return result

    monkeypatch.setattr(Pearl, "_accept", accept)
    assert not next(rejection_checks("pearl")).passed


def test_certificate_rejects_free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_time, "shares_device", lambda sequence: False)
    assert_rejected("pearl")


def test_drafts_on_a_device_of_their_own_take_no_time_of_the_target() -> None:
    with scripted(TARGET, TARGET) as llm:
        draft: Any = llm.engine.runners["draft"].model
        draft.executor = SimpleNamespace(device="cuda:1")
        recorded, _ = recorded_drafts(llm, "pearl:size=4", "abcabcabd")
    assert len(recorded) > 3
    assert all(seconds == 0.0 for _, seconds in recorded)

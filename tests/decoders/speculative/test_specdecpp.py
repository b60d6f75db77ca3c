"""SpecDec++: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative.specdecpp import StopThreshold
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("specdec++")


@pytest.mark.parametrize("defaults", [{"bound": 0.65}, {"min_drafts": 1}, {"size": 19}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specdec++", **defaults)
    assert_rejected("specdec++")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "specdec++", "speculative-sampling")
    assert_rejected("specdec++")


def test_certificate_rejects_a_chain_that_ends_one_draft_late_or_before_the_last_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = StopThreshold.__call__
    seen: list[bool] = []

    def late(self: StopThreshold, *given: object) -> bool:
        seen.append(call(self, *given))
        return len(seen) > 1 and seen[-2] and self.num_drafts > 1

    monkeypatch.setattr(StopThreshold, "__call__", late)
    assert_rejected("specdec++")

"""Recursive speculative decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.decoders.speculative import rsd
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("rsd")


@pytest.mark.parametrize("defaults", [{"width": 4}, {"depth": 3}, {"branching": "3-2-1"}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "rsd", **defaults)
    assert_rejected("rsd")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "rsd", "speculative-sampling")
    assert_rejected("rsd")


def test_certificate_rejects_beams_that_are_not_conditioned_on_their_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rsd, "condition_on_parent", lambda parent, keys: keys)
    assert_rejected("rsd")


@pytest.mark.parametrize("kind", ["iid", "point"])
@pytest.mark.parametrize("branching", ["", "3-2-1"])
def test_siblings_that_are_tested_by_another_rule_are_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: str, branching: str
) -> None:
    drafter = rsd.ConstantBranching if branching else rsd.StochasticBeam
    monkeypatch.setattr(drafter, "kind", kind)
    *_, last = rejection_checks("rsd", samples=20, kind="wor", branching=branching)
    assert not last.passed

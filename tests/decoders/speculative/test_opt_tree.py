"""OPT-Tree: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from anydecode.decoders.framework.draft_candidates import DraftCandidates
from anydecode.decoders.speculative.opt_tree import OptTreeDrafter
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("opt-tree")


@pytest.mark.parametrize("defaults", [{"size": 15}, {"delta": 0.4}, {"depth": 9}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "opt-tree", **defaults)
    assert_rejected("opt-tree")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "opt-tree", "speculative-sampling")
    assert_rejected("opt-tree")


def test_certificate_rejects_draft_probabilities_without_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        DraftCandidates, "acceptance_probabilities", property(lambda self: self.probabilities)
    )
    assert_rejected("opt-tree")


class _LaterGain:
    """The minimum gain of all levels but the first one."""

    def __init__(self, delta: float) -> None:
        self.delta, self.is_first = delta, True

    def __ge__(self, gain: float) -> bool:
        is_first, self.is_first = self.is_first, False
        return not is_first and gain <= self.delta


def test_certificate_rejects_a_first_level_that_never_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grow = OptTreeDrafter.grow

    def going_on(self: OptTreeDrafter, *given: Any) -> Any:
        drafter: Any = copy(self)
        drafter.delta = _LaterGain(self.delta)
        return (yield from grow(drafter, *given))

    monkeypatch.setattr(OptTreeDrafter, "grow", going_on)
    assert_rejected("opt-tree")

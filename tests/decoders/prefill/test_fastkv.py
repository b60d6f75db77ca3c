"""FastKV: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.prefill import fastkv
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("fastkv")


def test_certificate_rejects_scores_without_their_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = fastkv.window_scores
    monkeypatch.setattr(
        fastkv, "window_scores", lambda attention, groups, kernel: scores(attention, groups, 1)
    )
    assert_rejected("fastkv")


def test_certificate_rejects_the_least_attended_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = fastkv.chosen
    monkeypatch.setattr(fastkv, "chosen", lambda scores, count: chosen(-scores, count))
    assert_rejected("fastkv")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("budget", 511), ("propagate", 0.21), ("layer", 1), ("window", 7), ("kernel", 5)],
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fastkv.FastKV.__init__

    def build(self: fastkv.FastKV, budget: float | None = None, **given: Any) -> None:
        if budget is not None:
            given["budget"] = budget
        made(self, **{parameter: value, **given})

    monkeypatch.setattr(fastkv.FastKV, "__init__", build)
    assert_rejected("fastkv")

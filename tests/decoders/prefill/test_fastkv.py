"""FastKV: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.prefill import fastkv
from certificates import assert_certified, assert_rejected, replace_class_default


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
    replace_class_default(monkeypatch, fastkv.FastKV, parameter, value)
    assert_rejected("fastkv")

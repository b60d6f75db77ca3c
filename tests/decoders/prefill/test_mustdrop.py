"""MustDrop: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.prefill import mustdrop
from anydecode.scoring.prompt_embeds import PromptEmbeds
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("mustdrop")


def test_certificate_rejects_a_drop_by_either_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    def either(attention: np.ndarray, overall: float, single: float) -> np.ndarray:
        return (attention.sum(0) < overall * attention.sum()) | (attention.max(0) < single)

    monkeypatch.setattr(mustdrop, "dropped", either)
    assert_rejected("mustdrop")


def test_certificate_rejects_important_tokens_that_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(self: mustdrop.MustDrop, media: PromptEmbeds, length: int) -> np.ndarray:
        return np.zeros(length, bool)

    monkeypatch.setattr(mustdrop.MustDrop, "_protected", nothing)
    assert_rejected("mustdrop")


def test_certificate_rejects_windows_that_are_never_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apart(rows: np.ndarray, side: int, alike: float) -> tuple[np.ndarray, np.ndarray]:
        return rows, np.ones(len(rows), bool)

    monkeypatch.setattr(mustdrop, "merged", apart)
    assert_rejected("mustdrop")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("overall", 0.01),
        ("overall", 0.012),
        ("single", 0.009),
        ("single", 0.011),
        ("key", 0.07),
        ("key", 0.09),
        ("alike", 0.78),
        ("alike", 0.82),
    ],
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, mustdrop.MustDrop, parameter, value)
    assert_rejected("mustdrop")

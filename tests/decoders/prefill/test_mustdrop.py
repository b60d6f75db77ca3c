"""MustDrop: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.prefill import mustdrop
from anydecode.scoring.prompt_embeds import PromptEmbeds
from certificates import assert_certified, assert_rejected


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

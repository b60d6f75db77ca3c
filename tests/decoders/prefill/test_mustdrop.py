"""MustDrop: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill import mustdrop
from anydecode.models import clip
from anydecode.models.clip import ClipEncoder
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.prompt_embeds import PromptEmbeds
from certificates import assert_certified, assert_rejected, replace_class_default

#: The method without dropping.
NONE = "mustdrop:overall=0"


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


@pytest.mark.parametrize("mistake", ["raster order", "no window", "another threshold"])
def test_certificate_rejects_other_windows_in_the_encoder(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = clip.similar_windows

    def wrong(rows: np.ndarray, side: int, alike: float) -> list[np.ndarray]:
        if mistake == "another threshold":
            return own(rows, side, alike + 0.01)
        found = own(rows, side, alike)
        return sorted(found, key=lambda one: one[0]) if mistake == "raster order" else []

    monkeypatch.setattr(clip, "similar_windows", wrong)
    assert_rejected("mustdrop")


def test_certificate_rejects_the_importance_of_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ClipEncoder.merge

    def wrong(self: ClipEncoder, *given: Any) -> tuple[np.ndarray, np.ndarray]:
        rows, importance = own(self, *given)
        return rows, importance[::-1]

    monkeypatch.setattr(ClipEncoder, "merge", wrong)
    assert_rejected("mustdrop")


def test_certificate_rejects_a_number_of_key_tokens_that_is_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mustdrop, "ceil", round)
    assert_rejected("mustdrop")


@pytest.mark.parametrize(("is_grid", "num_kept"), [(True, 11), (False, 19)])
def test_rows_of_an_encoder_are_not_merged_again(is_grid: bool, num_kept: int) -> None:
    """A square number of equal rows that are no grid stay as they are."""
    media = PromptEmbeds(3, np.ones((9, 64), np.float32), is_grid=is_grid)
    with LLM(tiny_model(layers=6), tokenizer=ByteTokenizer()) as llm:
        request = llm.request("a" * 20, prompt_embeds=media, decoder=NONE, max_tokens=8)
        llm.start(request, background=False)
        jobs = llm.engine.running
        llm.driver.advance(lambda: bool(jobs) and len(jobs[0].sequence.tokens) > 1)
        table = jobs[0].sequence.kv_cache().table
    assert (table[:19] >= 0).sum() == num_kept


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

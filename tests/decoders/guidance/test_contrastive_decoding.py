"""Contrastive decoding: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.oracles.guidance.contrastive_decoding import contrast_llm
from anydecode.decoders.framework.two_models import fitted
from anydecode.decoders.guidance import contrastive_decoding
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import toy_llm


def test_certificate() -> None:
    assert_certified("contrastive-decoding")


@pytest.mark.parametrize(
    "other", [{"ratio": 0.2}, {"weight": 0.8}, {"amateur_temperature": 1.0}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "contrastive-decoding", **other)
    assert_rejected("contrastive-decoding")


def test_certificate_rejects_a_plausible_set_of_the_amateur(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(e: np.ndarray, a: np.ndarray, ratio: float, weight: float) -> np.ndarray:
        allowed = a >= a.max() + np.log(ratio)
        return np.where(allowed, e - weight * a, e - np.float32(1e4)).astype(np.float32)

    monkeypatch.setattr(contrastive_decoding, "contrasted", wrong)
    assert_rejected("contrastive-decoding")


def test_certificate_rejects_a_contrast_without_a_plausible_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        contrastive_decoding, "contrasted", lambda e, a, ratio, weight: e - weight * a
    )
    assert_rejected("contrastive-decoding")


def test_an_amateur_with_another_number_of_tokens() -> None:
    row = np.array([1.0, -np.inf, 3.0], np.float32)
    assert fitted(row, 5).tolist() == [1.0, 1.0, 3.0, 1.0, 1.0]
    assert fitted(row, 2).tolist() == [1.0, 1.0]


def test_a_constraint_that_allows_no_plausible_token_is_met() -> None:
    with toy_llm() as llm:
        for temperature in (0.0, 1.0):
            answer = llm.generate(
                "a",
                decoder="contrastive-decoding:ratio=1",
                constraint=Regex("cat|dog"),
                temperature=temperature,
                seed=1,
            )
            assert answer.text in ("cat", "dog")


def test_samples_are_plausible() -> None:
    llm, expert, _ = contrast_llm()
    with llm:
        options: dict[str, Any] = {"temperature": 3.0, "max_tokens": 40, "ignore_eos": True}
        tokens = llm.generate("ab", decoder="contrastive-decoding", seed=2, **options).tokens
    for position, token in enumerate(tokens):
        row = np.asarray(expert.script(tuple([97, 98, *tokens[:position]])))
        assert row[token] >= row.max() + np.log(0.1) - 1e-5


def test_a_draft_model_is_needed() -> None:
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(UnsupportedCombinationError, match="needs a draft model"):
            llm.generate("a", decoder="contrastive-decoding")


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"weight": -1.0}, {"amateur_temperature": 0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="contrastive-decoding needs"):
        catalogue.build("contrastive-decoding", **options)

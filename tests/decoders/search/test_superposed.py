"""Superposed decoding: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.search.superposed import PROMPTS, letter_model
from anydecode.decoders.search import superposed
from anydecode.decoders.search.superposed import Draft, Ngrams, Superposed
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"max_tokens": 10}


def test_certificate() -> None:
    assert_certified("superposed")


@pytest.mark.parametrize("other", [{"k": 4}, {"alpha": 0.4}, {"temperature": 0.2}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Superposed, name, value)
    assert_rejected("superposed")


@pytest.mark.parametrize(
    "name, value",
    [("WEIGHTS", (0.01, 0.04, 0.15, 0.18)), ("TOKENS_PER_TEXT", 2), ("UNKNOWN", 1.0)],
)
def test_certificate_rejects_another_rule(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(superposed, name, value)
    assert_rejected("superposed")


def test_certificate_rejects_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Superposed._mixed

    def equal(sequence: Any, live: list[Draft]) -> np.ndarray:
        return mixed(sequence, [Draft(one.tokens, 0.0) for one in live])

    monkeypatch.setattr(Superposed, "_mixed", staticmethod(equal))
    assert_rejected("superposed")


def test_equal_tokens_are_the_plain_embedding() -> None:
    with LLM(letter_model(), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:

        class Probe(Superposed):
            def prepare(self, sequence: Any) -> None:
                super().prepare(sequence)
                live = [Draft([98], -0.1), Draft([98], -0.7), Draft([98], -3.0)]
                assert self._mixed(sequence, live).tolist() == [98, 0, 0, 0]

        llm.generate("ab", decoder=Probe(), **OPTIONS)


def test_ngrams_are_counted() -> None:
    table = Ngrams()
    table.add([1, 2, 1, 2, 3])
    assert table.counts[(1, 2)] == {1: 1, 3: 1} and table.counts[(2,)] == {1: 1, 3: 1}
    assert (1, 2, 1, 2, 3) not in table.counts


def test_restarts_do_not_change_the_texts() -> None:
    def texts(share: float) -> list[list[int]]:
        with (
            LLM(letter_model(), tokenizer=ByteTokenizer(), cache_positions=4096) as llm,
            Restarts(llm.engine, 3, share),
        ):
            found = llm.generate(PROMPTS[0], decoder="superposed", n=3, **OPTIONS)
        return [one.tokens for one in found.samples]

    assert texts(0.4) == texts(0.0)


def test_what_it_cannot_do_is_refused() -> None:
    refused: list[dict[str, Any]] = [
        {"constraint": Regex("a+")}, {"repetition_penalty": 1.2}, {"logprobs": 0},
        {"guidance_scale": 2.0},
    ]  # fmt: skip
    with letters_llm() as llm:
        for options in refused:
            with pytest.raises(UnsupportedCombinationError, match="superposed"):
                llm.generate("ab", decoder="superposed", **options, **OPTIONS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read as text"):
        catalogue.build("superposed", texts=str(tmp_path / "none"))


@pytest.mark.parametrize("options", [{"k": 0}, {"alpha": 1.5}, {"temperature": 0.0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="superposed needs k|allowed are"):
        catalogue.build("superposed", **options)

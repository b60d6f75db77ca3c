"""Regression: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.decoders.framework import numeric_codes
from anydecode.decoders.framework.numeric_codes import RepeatedCode, numeric_code
from anydecode.decoders.search import regression
from anydecode.decoders.search.regression import Regression
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm

DIGITS = "0123456789+-"


class Hexadecimal(ByteTokenizer):
    """A tokenizer that spells every byte with two tokens."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode().hex().encode())


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("regression")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["regression"]())
    assert len(checks) == 13 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "other",
    [{"digits": 2}, {"estimate": "mean"}, {"base": 9}, {"samples": 64}, {"format": "floating"}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Regression, name, value)
    if "format" in other:
        replace_class_default(monkeypatch, Regression, "samples", 64)
    assert_rejected("regression")


def test_certificate_rejects_probabilities_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        regression,
        "digit_law",
        lambda scores, allowed: scores.distribution(-1).dense(259)[allowed],
    )
    assert_rejected("regression")


def test_certificate_rejects_exponents_by_floating_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(size: Fraction, base: int) -> int:
        return int(np.floor(np.log(float(size)) / np.log(base)))

    monkeypatch.setattr(numeric_codes, "_floor_log", rounded)
    assert_rejected("regression")


def test_certificate_rejects_the_first_code_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: RepeatedCode, digits: Any) -> Fraction:
        return self.code.decode(digits[: len(self.code.alphabets)])

    monkeypatch.setattr(RepeatedCode, "decode", first)
    assert_rejected("regression")


def test_certificate_rejects_equal_draws_in_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Regression._drawing

    def same(self: Regression, sequence: Any) -> Any:
        draw, *rest = drawing(self, sequence)
        return (lambda numbers, law, position: draw(numbers, law, 0), *rest)

    monkeypatch.setattr(Regression, "_drawing", same)
    assert_rejected("regression")


def test_beginnings_are_scored_once() -> None:
    with letters_llm(DIGITS) as llm:
        stats = llm.generate("y=", decoder="regression").stats
        drawn = llm.generate("z=", decoder="regression:format=floating,samples=64").stats
    assert (stats.rows, stats.passes) == (2 + 10 + 100, 3)
    assert drawn.rows < 2 + 5 * 64 and drawn.passes == 6


def test_a_constraint_leaves_its_numbers() -> None:
    with letters_llm(DIGITS) as llm:
        found = llm.generate("y=", decoder="regression:estimate=0 1", constraint=Regex("[3-5]+"),
                             n=2)  # fmt: skip
    assert [one.text for one in found.samples] == ["333", "555"]
    with letters_llm(DIGITS) as llm, pytest.raises(Exception, match="none of the digits"):
        llm.generate("y=", decoder="regression", constraint=Regex("x+"))


def test_samples_approach_the_enumeration() -> None:
    with letters_llm(DIGITS) as llm:
        exact = llm.generate("y=", decoder="regression:estimate=mean").score or 0.0
        means = [
            llm.generate("y=", decoder="regression:estimate=mean,samples=256", seed=i).score or 0.0
            for i in range(8)
        ]
    assert abs(np.mean(means) - exact) < 4 * np.std(means) / np.sqrt(8)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"estimate": ""}, "estimate is empty"),
        ({"estimate": "most"}, "estimate is 'most'; it may be mean, median, mode or a number"),
        ({"estimate": "1.5"}, "it may be mean, median, mode or a number from 0 to 1"),
        ({"format": "roman"}, "format is 'roman'; it may be normalized, floating, hamming"),
        ({"base": 40}, "base is 40; format normalized allows 2 to 36"),
        ({"format": "hamming"}, "base is 10; format hamming allows 2"),
        ({"format": "hamming", "base": 2, "digits": 13}, "format hamming allows up to 12"),
        ({"digits": 0}, "digits is 0; allowed are 1 to"),
        ({"digits": 60, "repeat": 3}, "up to 64 symbols"),
        ({"digits": 4}, "more than 256 beginnings of numbers; use fewer digits, or samples"),
        ({"samples": 1000}, "samples is 1000; it may be 0 to 256"),
        ({"low": 2.0, "high": 2.0}, "low must be below high, not 2 and 2"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("regression", **options)


def test_requests_that_do_not_fit_are_refused() -> None:
    with letters_llm(DIGITS) as llm:
        with pytest.raises(InvalidRequestError, match="the number has 3 tokens, but max_tokens"):
            llm.generate("y=", decoder="regression", max_tokens=2)
        with pytest.raises(UnsupportedCombinationError, match="leave logprobs out"):
            llm.generate("y=", decoder="regression", logprobs=1)
        llm.engine.check_integrity()
    with LLM(ScriptedModel(), tokenizer=Hexadecimal()) as llm:
        with pytest.raises(InvalidRequestError, match="no token for '0'; use another base or form"):
            llm.generate("ab", decoder="regression:base=2,digits=2")


def test_numbers_beyond_the_exponent_are_refused() -> None:
    code = numeric_code("floating", 10, 4, 1, 1)
    assert code.text(Fraction(-1234567)) == "-+61234"
    assert code.text(Fraction(1, 10**12)) == "++00000"
    with pytest.raises(InvalidRequestError, match="needs an exponent of more than 1 digits"):
        code.encode(Fraction(10**10))

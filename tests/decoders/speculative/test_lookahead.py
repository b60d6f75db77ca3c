"""Lookahead decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex
from anydecode.certification.checks import scripted_llm
from anydecode.decoders.speculative import lookahead
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("lookahead")


@pytest.mark.parametrize("defaults", [{"window": 6}, {"ngram": 5}, {"max_ngrams": 4}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "lookahead", **defaults)
    assert_rejected("lookahead")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "lookahead", "prompt-lookup")
    assert_rejected("lookahead")


def test_certificate_rejects_levels_that_stay_in_place_while_the_window_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = lookahead._Session.observe

    def observe(self: Any, round: Any) -> None:
        before = list(self.levels)
        own(self, round)
        if len(before) < self.drafter.ngram - 1:
            self.levels[:-1] = before

    monkeypatch.setattr(lookahead._Session, "observe", observe)
    assert_rejected("lookahead")


def test_certificate_rejects_a_window_that_forced_tokens_leave_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = lookahead._Session.observe

    def observe(self: Any, round: Any) -> None:
        if round.tree is self._drafted:
            own(self, round)

    monkeypatch.setattr(lookahead._Session, "observe", observe)
    assert_rejected("lookahead")


def test_certificate_rejects_columns_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead._Session, "_filler", lambda self, count: [97] * count)
    assert_rejected("lookahead")


def test_a_constraint_takes_no_rows_from_the_window() -> None:
    """The first window has tokens of the prompt, which the constraint forbids."""
    with scripted_llm() as llm:
        options: dict[str, Any] = {"constraint": Regex("[a-z]{12}"), "max_tokens": 12}
        answer = llm.generate("1234567", decoder="lookahead", trace=True, **options)
        plain = llm.generate("1234567", decoder="autoregressive", **options)
    assert answer.tokens == plain.tokens and answer.trace is not None
    # One, two and then three levels of five columns; n-grams come only after a full window.
    assert [len(one["drafted"]) for one in answer.trace[:3]] == [5, 10, 15]

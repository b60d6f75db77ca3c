"""Budget forcing: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.oracles.search.budget_forcing import (
    END,
    PIECES,
    PROMPT,
    counting_model,
    thinking_model,
)
from anydecode.decoders.search import budget_forcing
from anydecode.decoders.search.budget_forcing import BudgetForcing
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import PieceTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults


def thinking_llm() -> LLM:
    return LLM(thinking_model(), tokenizer=PieceTokenizer(*PIECES))


def test_certificate() -> None:
    assert_certified("budget-forcing")


@pytest.mark.parametrize(
    "other",
    [{"extensions": 0}, {"extensions": 2}, {"wait": "a"}, {"end": " so"}, {"limit": 3}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "budget-forcing", **other)
    assert_rejected("budget-forcing")


def test_certificate_rejects_a_marker_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_forcing, "_num_before", lambda held, marker: len(held))
    assert_rejected("budget-forcing")


def test_certificate_rejects_a_marker_found_in_single_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        BudgetForcing,
        "_has_ended",
        lambda self, sequence, state: state.tokens[-1] in (2, END),
    )
    assert_rejected("budget-forcing")


def test_certificate_rejects_a_budget_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = BudgetForcing._cut

    def fresh(self: Any, sequence: Any, state: Any, branch: Any, text: str) -> Any:
        state.num_thinking = 0 if text == self.wait else state.num_thinking
        return cut(self, sequence, state, branch, text)

    monkeypatch.setattr(BudgetForcing, "_cut", fresh)
    assert_rejected("budget-forcing")


def test_certificate_rejects_a_budget_that_counts_forced_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = BudgetForcing._cut

    def counted(self: Any, sequence: Any, state: Any, branch: Any, text: str) -> Any:
        state.num_thinking += text == self.wait
        return cut(self, sequence, state, branch, text)

    monkeypatch.setattr(BudgetForcing, "_cut", counted)
    assert_rejected("budget-forcing")


def test_streams_contain_the_text_as_it_becomes_final() -> None:
    with thinking_llm() as llm:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
        whole = llm.generate(PROMPT, decoder="budget-forcing", **options).text
        chunks = [str(one) for one in llm.stream(PROMPT, decoder="budget-forcing", **options)]
    assert "".join(chunks) == whole and len(chunks) > 4


def test_forced_tokens_have_no_log_probability() -> None:
    with LLM(counting_model(), tokenizer=PieceTokenizer(*PIECES)) as llm:
        found = llm.generate([5, 6], decoder="budget-forcing", logprobs=0, max_tokens=16)
    assert found.logprobs is not None and len(found.logprobs) == len(found.tokens)
    missing = [
        PIECES[token]
        for token, one in zip(found.tokens, found.logprobs, strict=True)
        if one is None
    ]
    assert missing == ["Wait"]


def test_stop_strings_end_the_reasoning_too() -> None:
    with LLM(counting_model(), tokenizer=PieceTokenizer(*PIECES)) as llm:
        found = llm.generate([5, 6], decoder="budget-forcing", stop="Wait", max_tokens=16)
    assert (found.text, found.finish_reason) == ("ab", "stop")


def test_the_limit_of_tokens_holds() -> None:
    with thinking_llm() as llm:
        for limit in range(1, 8):
            options: dict[str, Any] = {"temperature": 1.0, "seed": limit, "max_tokens": limit}
            found = llm.generate(PROMPT, decoder="budget-forcing:extensions=9", **options)
            assert len(found.tokens) <= limit
        llm.engine.check_integrity()


def test_constraints_and_words_that_cannot_be_spelled_are_refused() -> None:
    with thinking_llm() as llm:
        with pytest.raises(UnsupportedCombinationError, match="thinking_token_budget does"):
            llm.generate(PROMPT, decoder="budget-forcing", constraint=Regex("a+"))
        with pytest.raises(UnsupportedCombinationError, match="mirostat"):
            llm.generate(PROMPT, decoder="budget-forcing", mirostat=2, temperature=1.0)
        with pytest.raises(InvalidRequestError, match="no tokens for 'Hmm'"):
            llm.generate(PROMPT, decoder="budget-forcing:wait=Hmm")


@pytest.mark.parametrize("options", [{"limit": -1}, {"extensions": -1}, {"wait": ""}, {"end": ""}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="budget-forcing needs|allowed are"):
        catalogue.build("budget-forcing", **options)

"""Simultaneous translation: its certificate, mistakes that the certificate rejects, and its
options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.search.simul_mt import (
    END,
    PIECES,
    READ,
    SOURCES,
    TRAINED,
    WRITE,
    part_llm,
)
from anydecode.decoders.search import simul_mt
from anydecode.decoders.search.simul_mt import SimulMt, average_lagging, split_source
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm


def test_certificate() -> None:
    assert_certified("simul-mt")


@pytest.mark.parametrize(
    "other", [{"k": 4}, {"policy": "trained"}, {"end_of_read": "<r>"}, {"end_of_write": "<w>"}],
    ids=str,
)  # fmt: skip
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, SimulMt, name, value)
    assert_rejected("simul-mt")


def test_certificate_rejects_words_that_are_read_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All words are read before the first is written."""
    monkeypatch.setattr(SimulMt, "_waited", lambda self, state, count: state.num_read == count)
    assert_rejected("simul-mt")


def test_certificate_rejects_parts_that_end_with_their_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = SimulMt._ends

    def one_token(self: SimulMt, tokenizer: Any, state: Any, *given: Any) -> bool:
        return ends(self, tokenizer, state, *given) or (not given[-1] and len(state.part) == 1)

    monkeypatch.setattr(SimulMt, "_ends", one_token)
    assert_rejected("simul-mt")


@pytest.mark.parametrize("name, value", [("EXTRA", 24), ("TOKENS_PER_WORD", 3)])
def test_certificate_rejects_another_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(simul_mt, name, value)
    assert_rejected("simul-mt")


def test_the_last_part_of_a_trained_model_has_a_limit() -> None:
    with part_llm(ends=False) as llm:
        found = llm.generate(SOURCES[2], decoder=f"{TRAINED},source==", max_tokens=240)
    assert found.finish_reason == "stop" and len(found.tokens) < 2 * (2 + 25) * 2


def test_a_part_cannot_end_before_it_has_begun() -> None:
    """Behind every word the model finds the mark of a part more probable than that of the words."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(END + 1, np.float32)
        if seen[-1] == READ:
            row[2] = 9.0
        else:
            row[[WRITE, READ]] = 3.0, 2.0
        return row

    model = ScriptedModel(script, vocab_size=END + 1)
    with LLM(model, tokenizer=PieceTokenizer(*PIECES), cache_positions=4096) as llm:
        found = llm.generate("= a b", decoder=f"{TRAINED},source==", max_tokens=9, trace=True)
    assert found.text == "cc"
    assert [one["num_read"] for one in found.trace or ()] == [1, 2, 2]


def test_nothing_is_computed_twice() -> None:
    """Rows: the words, the marks and the tokens that are fed."""
    with part_llm() as llm:
        found = llm.generate(SOURCES[2], decoder=f"{TRAINED},source==", max_tokens=12)
    assert found.stats.rows <= 3 + 2 * 2 + 12


def test_words_begin_with_white_space() -> None:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("to German: the cat sat")
    start, words = split_source(tokenizer, prompt, "German:")
    assert tokenizer.decode(start) == "to German:"
    assert [tokenizer.decode(word) for word in words] == [" the", " cat", " sat"]
    start, words = split_source(tokenizer, [257, *b"a b"], "")
    assert start == [257] and words == [[97], [32, 98]]
    for text, marker in (("a b", "x"), ("ab", "ab")):
        with pytest.raises(InvalidRequestError, match="the prompt has no"):
            split_source(tokenizer, tokenizer.encode(text), marker)


def test_lags() -> None:
    assert average_lagging([3, 4, 5, 5, 5], 5, 5) == 3
    assert average_lagging([5, 5], 5, 2) == 5  # the whole source first
    assert average_lagging([1, 2, 3], 3, 6) == pytest.approx((1 + 1.5 + 2) / 3)


def test_restarts_do_not_change_the_text() -> None:
    for decoder in ("simul-mt", f"{TRAINED},source=="):

        def tokens(share: float, decoder: str = decoder) -> list[int]:
            with part_llm() as llm, Restarts(llm.engine, 3, share):
                return llm.generate(SOURCES[0], decoder=decoder, max_tokens=20).tokens

        assert tokens(0.3) == tokens(0.0)


def test_log_probabilities() -> None:
    with part_llm() as llm:
        answer = llm.generate(SOURCES[0], decoder="simul-mt", max_tokens=9, logprobs=0)
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_log_probabilities_of_the_prompt_do_not_change_the_text() -> None:
    """They leave the whole prompt in the cache, of which only the words that were read count."""
    with part_llm() as llm:
        plain, scored = (
            llm.generate(SOURCES[0], decoder="simul-mt", max_tokens=9, prompt_logprobs=count)
            for count in (None, 1)
        )
    assert scored.tokens == plain.tokens
    assert scored.prompt_logprobs is not None and None not in scored.prompt_logprobs[1:]


def test_what_it_cannot_do_is_refused() -> None:
    with letters_llm() as llm:
        with pytest.raises(UnsupportedCombinationError, match="no constraint"):
            llm.generate("a b", decoder="simul-mt", constraint=Regex("a+"))
        with pytest.raises(UnsupportedCombinationError, match="as one token each"):
            llm.generate("a b", decoder="simul-mt:policy=trained")


@pytest.mark.parametrize("options", [{"k": 0}, {"policy": "none"}, {"end_of_read": ""}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="simul-mt needs|allowed are"):
        catalogue.build("simul-mt", **options)

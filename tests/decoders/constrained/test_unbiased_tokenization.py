"""Decoding without tokenization bias: its certificate, a mistake that it rejects, and its
options."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import LLM, Regex
from anydecode.certification.oracles.constrained.markov_chain import CHAIN, chain_llm, share_of_a
from anydecode.constraints.vocabulary import Vocabulary
from anydecode.decoders.constrained import unbiased_tokenization
from anydecode.decoders.constrained.unbiased_tokenization import (
    Cover,
    UnbiasedTokenization,
    next_bytes,
)
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.scoring.tree import ROOT, TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("unbiased-tokenization")


def test_certificate_rejects_covers_that_the_tokenizer_cannot_produce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unbiased_tokenization, "is_written", lambda *_: True)
    assert_rejected("unbiased-tokenization")


def test_the_next_letter_has_the_distribution_of_the_chain() -> None:
    for prompt in ("BA", "BAAA"):
        decoder = UnbiasedTokenization()
        with chain_llm() as llm:
            llm.generate(prompt, decoder=decoder, max_tokens=1)
        assert decoder.last_bytes is not None
        assert decoder.last_bytes[ord("A")] == pytest.approx(CHAIN["A"], abs=1e-6)
    assert share_of_a(None, 20) == 0
    assert abs(share_of_a(UnbiasedTokenization(), 200) - CHAIN["A"]) < 0.1


def test_an_answer_is_the_text_after_the_prompt() -> None:
    with chain_llm() as llm:
        answer = llm.generate(
            "BAAB",
            decoder="unbiased-tokenization",
            temperature=1.0,
            logprobs=1,
            max_tokens=6,
            seed=3,
        )
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.tokens) == 6
    assert set(answer.text) <= {"A", "B"}


def test_constraints_and_invalid_options_are_refused() -> None:
    with chain_llm() as llm, pytest.raises(UnsupportedCombinationError, match="constraint"):
        llm.generate("BA", decoder="unbiased-tokenization", constraint=Regex("[AB]+"))
    with pytest.raises(InvalidRequestError):
        UnbiasedTokenization(0)


def test_the_shares_of_all_covers_with_the_same_next_byte_add_up() -> None:
    tokenizer = PieceTokenizer("a", "ab", "abc", "b")
    with np.errstate(divide="ignore"):
        after_a = np.log(np.array([0, 0, 0, 0.8, 0.2], np.float32))  # "b", and the end of text
    found = next_bytes(
        Vocabulary(tokenizer, tokenizer.vocab_size),
        TokenTree([0], [ROOT]),
        [Cover(ROOT, token) for token in range(3)],
        np.log([0.5, 0.3, 0.2]),
        [np.zeros(5, np.float32), after_a],
        b"a",
    )
    assert found[ord("b")] == pytest.approx(0.3 + 0.2 + 0.5 * 0.8)
    assert found[256] == pytest.approx(0.5 * 0.2)
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("other", [{"max_tokens": 1}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "unbiased-tokenization", **other)
    assert_rejected("unbiased-tokenization")


def test_a_tokenizer_without_the_rest_of_a_token_is_refused_at_the_request() -> None:
    """The prompt "xa" may go on with the token "ab", whose rest "b" is no token."""
    model = ScriptedModel(vocab_size=5, seed=1)
    for pieces, is_refused in ((("x", "a", "ab"), True), (("x", "a", "ab", "b"), False)):
        with LLM(model, tokenizer=PieceTokenizer(*pieces), cache_positions=64) as llm:
            for decoder in ("unbiased-tokenization", "token-healing"):
                if is_refused:
                    with pytest.raises(UnsupportedCombinationError, match="the rest of some"):
                        llm.request("xa", decoder=decoder)
                else:
                    llm.generate("xa", decoder=decoder, max_tokens=4)

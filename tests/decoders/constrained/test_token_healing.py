"""Token healing: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode import Regex, catalogue
from anydecode.certification.checks import scripted_llm
from anydecode.certification.oracles.constrained.markov_chain import chain_llm
from anydecode.constraints.vocabulary import Vocabulary
from anydecode.decoders.constrained import token_healing
from anydecode.decoders.constrained.token_healing import healing_tokens
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import BOS, ByteTokenizer, PieceTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("token-healing")


def test_certificate_rejects_the_same_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        token_healing, "healing_tokens", lambda vocab, tail: set(vocab.tokens_equal_to(tail))
    )
    assert_rejected("token-healing")


def test_certificate_rejects_a_prompt_that_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        token_healing.TokenHealing, "cut", lambda self, tokenizer, prompt: len(prompt)
    )
    assert_rejected("token-healing")


@pytest.mark.parametrize(
    ("prompt", "count", "kept"),
    [
        ([97, 98, 99, 100, 101], 1, 4),
        ([97, 98, 99, 100, 101], 2, 3),
        ([97, 98, 99], 9, 1),  # at least one token stays
        ([97], 1, 1),
        ([97, BOS, 98, 99], 3, 2),  # a special token has no text to generate again
        ([97, BOS], 1, 2),
    ],
)
def test_the_last_tokens_with_text_are_cut(prompt: list[int], count: int, kept: int) -> None:
    assert catalogue.build("token-healing", count=count).cut(ByteTokenizer(), prompt) == kept


def test_tokens_that_agree_with_the_text_may_come() -> None:
    tokenizer = PieceTokenizer("a", "ab", "abc", "abcd", "b", "abx")
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    pieces = {tokenizer.token_text(token) for token in healing_tokens(vocabulary, b"abc")}
    assert pieces == {"a", "ab", "abc", "abcd"}


@pytest.mark.parametrize("decoder", ["token-healing", "token-healing:count=2"])
def test_an_answer_is_the_text_after_the_prompt(decoder: str) -> None:
    with chain_llm() as llm:
        answer = llm.generate(
            "BAAB", decoder=decoder, temperature=1.0, logprobs=1, max_tokens=6, seed=3
        )
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.tokens) == 6
    assert set(answer.text) <= {"A", "B"}


@pytest.mark.parametrize("decoder", ["token-healing", "unbiased-tokenization"])
def test_log_probabilities_of_the_prompt_do_not_change_the_text(decoder: str) -> None:
    """They leave the whole prompt in the cache, whose last tokens are cut."""
    with scripted_llm() as llm:
        plain, scored = (
            llm.generate("one two three", decoder=decoder, max_tokens=6, prompt_logprobs=count)
            for count in (None, 1)
        )
    assert scored.tokens == plain.tokens
    assert scored.prompt_logprobs is not None and None not in scored.prompt_logprobs[1:]


def test_constraints_and_invalid_options_are_refused() -> None:
    with chain_llm() as llm, pytest.raises(UnsupportedCombinationError, match="constraint"):
        llm.generate("BA", decoder="token-healing", constraint=Regex("[AB]+"))
    with pytest.raises(InvalidRequestError):
        catalogue.build("token-healing", count=0)


@pytest.mark.parametrize("other", [{"count": 2}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "token-healing", **other)
    assert_rejected("token-healing")

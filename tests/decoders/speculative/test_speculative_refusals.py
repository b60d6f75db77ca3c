"""Unsupported drafting requests are rejected with a one-line error, and nothing else is run
instead.
"""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


def llm(**options: Any) -> LLM:
    return LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), **options)


def error_message(decoder: Any, **options: Any) -> str:
    with llm(**options) as engine, pytest.raises(AnydecodeError) as error:
        engine.generate("abcabc", decoder=decoder, max_tokens=8)
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ("speculative-sampling", "draft model"),
        ("prompt-lookup:size=0", "allowed are 1 to 1024"),
        ("speculative-sampling:size=0", "allowed are 1 to 1024"),
        ("auto:max_drafts=0", "allowed are 1 to 1024"),
        ("smartspec:drafter=autoregressive", "not a method with a drafter"),
        ("smartspec:drafter=beam", "not a method with a drafter"),
        ("bandit:max_drafts=0", "allowed are 1 to 1024"),
        ("suffix:min_probability=0", "min_probability"),
        ("lookahead:window=0", "window"),
        ("prompt-lookup:tree=7", "tree"),
        ("no-such-method", "no-such-method"),
    ],
)
def test_invalid_decoders_are_rejected(decoder: str, expected: str) -> None:
    assert expected in error_message(decoder)


def test_unloadable_draft_model_is_rejected() -> None:
    for draft in ("/no/such/file.gguf", "self:layers=many", "self:int4"):
        with pytest.raises(AnydecodeError) as error:
            llm(draft=draft)
        assert "\n" not in str(error.value)


class MaximalDrafter(Drafter):
    """Drafts as many nodes as allowed: one path, or all of them as siblings."""

    def __init__(self, chain: bool) -> None:
        self.chain = chain

    def open(self, sequence: Sequence) -> DraftSession:
        chain = self.chain

        class Nodes(TextDraftSession):
            def tree(self, size: int) -> TokenTree:
                tokens = list(range(97, 97 + size))
                return TokenTree.chain(tokens) if chain else TokenTree(tokens, [-1] * size)

        return Nodes(sequence)


@pytest.mark.parametrize("chain", [True, False])
def test_texts_whose_drafts_do_not_fit_the_cache_are_generated_without(chain: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    with llm(cache_positions=32) as engine:
        plain = engine.generate("abcabc", decoder="autoregressive", **options)
        decoder = Speculative(MaximalDrafter(chain), 40)
        answer = engine.generate("abcabc", decoder=decoder, **options)
        assert answer.tokens == plain.tokens and len(answer.tokens) == 8
        engine.engine.check_integrity()


def test_requested_decoder_is_not_replaced() -> None:
    with llm() as engine:
        answer = engine.generate("abcabc", decoder="prompt-lookup", max_tokens=8)
        assert answer.decoder == "prompt-lookup"
        assert engine.generate("abcabc", max_tokens=8).decoder == engine.default_decoder == "auto"
    diffusing = LLM(ScriptedModel(causal=False), tokenizer=ByteTokenizer(), cache_positions=256)
    with diffusing as engine:
        assert engine.generate("abcabc", max_tokens=8).decoder == engine.default_decoder == "llada"
        with pytest.raises(AnydecodeError, match="needs a causal model"):
            engine.generate("abcabc", decoder="auto", max_tokens=8)

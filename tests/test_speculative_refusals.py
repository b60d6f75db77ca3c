"""What cannot be done with drafts is told in one line, and nothing else is done instead."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative.core import Drafter, DraftSession, Speculative, TextDraftSession
from anydecode.engine.llm import LLM
from anydecode.errors import AnydecodeError, OutOfMemoryError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


def llm(**options: Any) -> LLM:
    return LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), **options)


def refusal(decoder: Any, **options: Any) -> str:
    with llm(**options) as engine, pytest.raises(AnydecodeError) as error:
        engine.generate("abcabc", decoder=decoder, max_tokens=8)
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("decoder", "told"),
    [
        ("speculative-sampling", "draft model"),
        ("prompt-lookup:size=0", "at least one draft"),
        ("speculative-sampling:size=0", "at least one draft"),
        ("auto:most=0", "most >= 1"),
        ("smartspec:drafter=autoregressive", "no drafter"),
        ("smartspec:drafter=beam", "no drafter"),
        ("bandit:largest=0", "at least one draft"),
        ("suffix:least=0", "least"),
        ("lookahead:window=0", "window"),
        ("prompt-lookup:tree=7", "tree"),
        ("no-such-method", "no-such-method"),
    ],
)
def test_budgets_of_nothing_and_pairs_that_do_not_go(decoder: str, told: str) -> None:
    assert told in refusal(decoder)


def test_a_draft_model_that_cannot_be_loaded() -> None:
    for draft in ("/no/such/file.gguf", "self:layers=many", "self:int4"):
        with pytest.raises(AnydecodeError) as error:
            llm(draft=draft)
        assert "\n" not in str(error.value)


class Bold(Drafter):
    """As many nodes as it may draft: one path, or all of them side by side."""

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
def test_a_tree_that_is_larger_than_the_cache(chain: bool) -> None:
    with llm(cache_positions=32) as engine:
        with pytest.raises(OutOfMemoryError, match="too few") as error:
            engine.generate("abcabc", decoder=Speculative(Bold(chain), 40), max_tokens=8)
        assert "\n" not in str(error.value)
        engine.engine.check_integrity()
        assert len(engine.generate("abcabc", max_tokens=8, ignore_eos=True).tokens) == 8


def test_nothing_is_done_instead() -> None:
    with llm() as engine:
        answer = engine.generate("abcabc", decoder="prompt-lookup", max_tokens=8)
        assert answer.decoder == "prompt-lookup"
        assert engine.generate("abcabc", max_tokens=8).decoder == engine.default_decoder == "auto"
    diffusing = LLM(ScriptedModel(causal=False), tokenizer=ByteTokenizer(), cache_positions=256)
    with diffusing as engine:
        assert engine.generate("abcabc", max_tokens=8).decoder == engine.default_decoder == "llada"
        with pytest.raises(AnydecodeError, match="needs a causal model"):
            engine.generate("abcabc", decoder="auto", max_tokens=8)

"""Oracle test of token-healing (Lundberg, 2023): the tokens that fit the removed text, and the
longer token that the model would have generated."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.constrained.markov_chain import CHAIN, share_of_a
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.constrained.token_healing import TokenHealing, healing_tokens
from anydecode.models.scripted import PieceTokenizer, ScriptedModel


@oracle_test("token-healing")
def token_healing() -> Iterator[Check]:
    """`http:`, whose last token is replaced by the longer token that the model would have
    generated."""
    tokenizer = PieceTokenizer("http", ":", "://", "x", "/", "h")
    vocab = vocabulary(tokenizer, 7)
    for tail, truth in ((b":", {1, 2}), (b"http", {0, 5}), (b"x", {3}), (b"://", {1, 2})):
        got = healing_tokens(vocab, tail)
        yield Check(f"tokens that fit {tail.decode()}", got == truth, f"{sorted(got)}")
    after: dict[tuple[int, ...], dict[int, float]] = {
        (0,): {1: 0.0, 2: 3.0, 6: 9.0},
        (2,): {3: 9.0},
        (1,): {6: 9.0},
        (3,): {6: 9.0},
    }
    model = ScriptedModel(after, vocab_size=7)
    with LLM(model, tokenizer=tokenizer, cache_positions=64) as llm:
        plain = llm.generate("http:").text
        healed = llm.generate("http:", decoder="token-healing").text
    yield Check("continues with the longer token", (plain, healed) == ("", "//x"), healed)
    after = {(0,): {4: 9.0, 3: 5.0, 1: 1.0}, (1,): {5: 9.0, 2: 1.0}, (5,): {9: 9.0}, (4,): {9: 9.0}}
    tokenizer = PieceTokenizer("q", "a", "b", "ab", "abx", "by", "c", "x", "y")
    with LLM(ScriptedModel(after, vocab_size=10), tokenizer=tokenizer, cache_positions=64) as llm:
        healed = llm.generate([0, 1, 2], decoder="token-healing").text
    yield Check("the default build heals one token", healed == "y", healed)


@measure("token-healing", "distance from the true chain", samples=400, margin=0.07)
def healing_loss(samples: int) -> float:
    """The error of the share of the next letter; healing one token is enough here."""
    return abs(share_of_a(TokenHealing(), samples) - CHAIN["A"])

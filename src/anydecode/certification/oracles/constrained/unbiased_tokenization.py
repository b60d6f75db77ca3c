"""Oracle test of unbiased-tokenization (arXiv:2406.16829, arXiv:2410.09303): the covers of the
prompt's end, and the exact distribution of the next letter of a Markov chain."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.constrained.markov_chain import (
    _A,
    _AA,
    _B,
    CHAIN,
    chain_llm,
    share_of_a,
)
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.constrained.unbiased_tokenization import UnbiasedTokenization, covers
from anydecode.models.scripted import PieceTokenizer, ScriptedModel


@oracle_test("unbiased-tokenization")
def unbiased_tokenization() -> Iterator[Check]:
    """The paper's chain: covers found by hand, and the exact distribution of the next letter."""
    tokenizer = PieceTokenizer("A", "B", "AA")
    tree, completions = covers(tokenizer, vocabulary(tokenizer, 4), [_B], b"AAA")
    paths = sorted([*(tree.tokens[n] for n in tree.path(c.node)), c.token] for c in completions)
    yield Check("covers of the prompt's end", paths == [[_AA, _A], [_AA, _AA]], f"{paths}")
    with chain_llm() as llm:
        for prompt, truth in (("BA", 0.7), ("BAAA", 0.7), ("BAA", 0.7), ("AB", 0.4)):
            decoder = UnbiasedTokenization()
            llm.generate(prompt, decoder=decoder, max_tokens=1)
            got = decoder.last_bytes
            assert got is not None
            exact = abs(got[ord("A")] - truth) < 1e-6 and abs(got.sum() - 1) < 1e-9
            yield Check(f"next letter after {prompt}", bool(exact), f"{got[ord('A')]:.6f}")
    yield _several_tokens()
    plain = share_of_a(None, 20)
    yield Check("plain decoding never generates it", plain == 0, f"{plain}, truth {CHAIN['A']}")


def _several_tokens() -> Check:
    """After "q", the model writes "xyz" as one token with probability 0.6, else "xyw" as three. The
    prompt "qxy" ends inside the first after two tokens."""
    after: dict[tuple[int, ...], dict[int, float]] = {
        (0,): {4: math.log(0.6), 1: math.log(0.4)},
        (1,): {2: 0.0},
        (2,): {5: 0.0},
    }
    model = ScriptedModel(after, vocab_size=7)
    decoder = catalogue.build("unbiased-tokenization")
    with LLM(model, tokenizer=PieceTokenizer("q", "x", "y", "z", "xyz", "w")) as llm:
        llm.generate("qxy", decoder=decoder, max_tokens=1)
    assert decoder.last_bytes is not None
    share = float(decoder.last_bytes[ord("z")])
    return Check("a token that covers two of the prompt's", abs(share - 0.6) < 1e-3, f"{share:.4f}")


@measure("unbiased-tokenization", "distance from the true chain", samples=400, margin=0.07)
def unbiased_loss(samples: int) -> float:
    """The error of the share of the next letter. Plain decoding has an error of 0.7."""
    return abs(share_of_a(UnbiasedTokenization(), samples) - CHAIN["A"])

"""Oracle of momentum (Momentum Decoding, arXiv:2212.02175): the longest n-gram that each token
would repeat; and the share of 4-grams that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import log_probabilities
from anydecode.certification.oracles.sampling.repetition import circular, repetition
from anydecode.certification.oracles.sampling.token_sets import descending
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.params import SamplingParams


@oracle("momentum", {"alpha": 0.2, "k": 4}, {"alpha": 0.5, "k": 3}, {})
def momentum_probabilities(
    context: OracleContext, tokens: Text, alpha: float = 0.2, k: int = 5
) -> np.ndarray:
    """The longest n-gram, of at most five tokens, that would end in a token and occurred before;
    its length is the penalty."""
    text = [*context.prompt, *tokens]
    probabilities = softmax(context.logits(tokens))
    values = {}
    for token in descending(probabilities)[:k]:
        depth = 0
        for length in range(1, 6):
            gram = [*text[len(text) - length + 1 :], token]
            positions = range(len(text) - length + 1)
            if any(text[i : i + length] == gram for i in positions):
                depth = length
        values[token] = probabilities[token] - alpha * depth
    row = np.zeros(VOCABULARY)
    row[max(values, key=lambda token: (values[token], -token))] = 1.0
    return row


@oracle_test("momentum")
def momentum() -> Iterator[Check]:
    """After 7 1 2 7 1: token 2 would close a loop of three (7 1 2), token 7 one of one; alpha
    0.2."""
    row = log_probabilities(0.2, 0.05, 0.5, 0.01, 0.01, 0.01, 0.01, 0.21)
    parameters: dict[str, Any] = {"momentum_alpha": 0.2, "momentum_k": 3, "temperature": 0.0}
    sampler = SamplingParams(**parameters).sampler((7, 1, 2, 7, 1), 8)
    token = int(sampler.distribution(row).tokens[0])  # type: ignore[index]
    yield Check("0.2 beats 0.5 - 0.6 and 0.21 - 0.2", token == 0, f"token {token}")
    gentle = SamplingParams(**{**parameters, "momentum_alpha": 0.05}).sampler((7, 1, 2, 7, 1), 8)
    token = int(gentle.distribution(row).tokens[0])  # type: ignore[index]
    yield Check("0.5 - 0.15 wins at alpha 0.05", token == 2, f"token {token}")
    row = log_probabilities(0.19, 0.18, 0.17, 0.16, 0.15, 0.14, 0.01)
    with LLM(ScriptedModel(lambda seen: row, 7), tokenizer=ByteTokenizer()) as llm:
        for prompt, expected in (([0, 1, 2, 3], 4), ([0, 1, 2, 3, 4], 0)):
            (token,) = llm.generate(prompt, max_tokens=1, decoder="momentum").tokens
            detail = f"token {token} after {prompt}"
            yield Check("the default build considers five tokens", token == expected, detail)
    with LLM(circular(), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        answer = llm.generate([7, 0], max_tokens=40, ignore_eos=True, decoder="momentum")
    yield Check("one pass per token", answer.stats.passes == 40)


@measure("momentum", "4-grams that repeat", samples=80, margin=0.25)
def momentum_claim(samples: int) -> float:
    """Loops are broken without access to hidden states."""
    return repetition(circular(), samples, momentum_alpha=0.2)

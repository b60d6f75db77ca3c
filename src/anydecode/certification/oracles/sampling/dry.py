"""Oracle of dry (Don't Repeat Yourself, p-e-w, 2024): the longest repetition that each token would
continue; and the share of 4-grams that repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import sampling_distribution
from anydecode.certification.oracles.sampling.repetition import circular, repetition
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax


@oracle("dry", {"multiplier": 1.2, "base": 1.5, "allowed": 1}, {})
def dry_probabilities(
    context: OracleContext,
    tokens: Text,
    multiplier: float = 0.8,
    base: float = 1.75,
    allowed: int = 2,
) -> np.ndarray:
    """For each token, the text before each earlier occurrence is compared with the end of the
    text."""
    text = [*context.prompt, *tokens]
    logits = context.logits(tokens).copy()
    for token in range(VOCABULARY):
        longest = 0
        for position in (i for i in range(1, len(text)) if text[i] == token):
            length = 0
            while length < position and text[position - 1 - length] == text[len(text) - 1 - length]:
                length += 1
            longest = max(longest, length)
        if longest >= allowed:
            logits[token] -= multiplier * base ** (longest - allowed)
    return softmax(logits / context.temperature)


@oracle_test("dry")
def dry() -> Iterator[Check]:
    """After 1 2 3 9 1 2: token 3 would continue a repetition of two, and loses 0.8 * 1.75^0."""
    row = np.zeros(10)
    parameters = {"dry_multiplier": 0.8, "dry_allowed": 2}
    p = sampling_distribution(row, (1, 2, 3, 9, 1, 2), **parameters)
    lower = math.exp(-0.8)
    yield Check(
        "token 3 is lowered by e^-0.8", abs(p[3] / p[0] - lower) < 1e-6, f"{p[3] / p[0]:.4f}"
    )
    yield Check("no other token is lowered", bool((np.delete(p, 3) == p[0]).all()))
    p = sampling_distribution(row, (4, 1, 2, 3, 9, 4, 1, 2), **parameters)
    lower = math.exp(-0.8 * 1.75)
    yield Check("a repetition of three costs 1.75 times that", abs(p[3] / p[0] - lower) < 1e-6)
    plain = repetition(circular(), 80)
    yield Check("greedy decoding repeats itself", plain > 0.9, f"{plain:.2f} of 4-grams repeat")


@measure("dry", "4-grams that repeat", samples=120, margin=0.5)
def dry_claim(samples: int) -> float:
    """Loops are broken."""
    return repetition(circular(), samples, dry_multiplier=0.8)

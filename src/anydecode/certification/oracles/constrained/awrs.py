"""Oracle test of awrs (Adaptive Weighted Rejection Sampling, arXiv:2504.05410): the weights of all
orders of a draw without replacement, and the distance from the model's distribution given the
constraint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.constrained.trap_model import TRUTH, distance, trap_llm
from anydecode.constraints.languages import Regex
from anydecode.decoders.constrained.awrs import STATE, Awrs, draw
from anydecode.sampling.noise import Noise


@oracle_test("awrs")
def awrs() -> Iterator[Check]:
    """All orders of a draw without replacement against the paper's estimator, and the sampler's
    weights against the tests it made."""
    probabilities = np.array([0.3, 0.4, 0.2, 0.1])
    for valid in ({1, 3}, {2}, {0, 1, 2, 3}):
        mean, by_token = 0.0, dict.fromkeys(valid, 0.0)
        weights = {}
        for order in permutations(range(4)):
            probability, token, weight, tests = _by_hand(probabilities, order, valid)
            mean += probability * weight
            by_token[token] += probability * weight
            weights[round(float(np.log(weight)), 9), token, tests] = True
        truth = {token: float(probabilities[token]) for token in valid}
        close = max(abs(by_token[token] - truth[token]) for token in valid) < 1e-12
        yield Check(f"weights are unbiased, {sorted(valid)} valid", close, f"mean {mean:.3f}")
        drawn = [
            draw(probabilities, np.arange(4), valid.__contains__, Noise(seed), 0)
            for seed in range(100)
        ]
        are_known = all((round(d.log_weight, 9), d.token, d.tests) in weights for d in drawn)
        yield Check(f"draws have those weights, {sorted(valid)} valid", are_known, "100 draws")
    yield from _peaked()
    yield from _default_build()


def _peaked() -> Iterator[Check]:
    """The mean weight by token where one token has 0.7 of the probability: the other estimator."""
    probabilities = np.array([0.7, 0.15, 0.1, 0.05])
    for valid in ({0, 2}, {1, 3}):
        drawn = [
            draw(probabilities, np.arange(4), valid.__contains__, Noise(seed), 0)
            for seed in range(3000)
        ]
        worst = 0.0
        for token in valid:
            weights = np.array([np.exp(d.log_weight) * (d.token == token) for d in drawn])
            worst = max(worst, deviations(weights, float(probabilities[token])))
        detail = f"{worst:.1f} standard errors"
        yield Check(f"weights are unbiased after 0.7, {sorted(valid)} valid", worst < 4, detail)


def deviations(values: np.ndarray, truth: float) -> float:
    """How many standard errors the mean of `values` is from `truth`."""
    return abs(float(values.mean()) - truth) / (float(values.std()) / np.sqrt(len(values)) + 1e-12)


def _default_build() -> Iterator[Check]:
    """The particles of the default build after three letters, of which the second is a trap and the
    third is free: the mean weight of each text is its probability under the model, for every number
    of particles, and resampling keeps the weights even."""
    constraint = Regex("(aa|ba|bb)(a|b)")
    found: list[dict[str, float]] = []
    evenness = []
    with trap_llm(longer=True) as llm:
        for seed in range(200):
            options: dict[str, Any] = {"decoder": "awrs", "temperature": 1.0, "seed": seed}
            request = llm.request("?", constraint=constraint, **options)
            llm.start(request, background=False)
            llm.driver.advance(lambda: request.done)  # noqa: B023
            particles = request.jobs[0].sequence.state[STATE]["particles"]
            weights = np.exp([weight for _, weight, *_ in particles])
            texts = [
                bytes(token for token in tokens if token < 256).decode() for tokens, *_ in particles
            ]
            found.append(
                {
                    t: float(weights[[text == t for text in texts]].sum()) / len(texts)
                    for t in set(texts)
                }
            )
            if weights.any():
                evenness.append(float(weights.sum() ** 2 / (weights**2).sum()))
    worst = max(
        deviations(np.array([one.get(word + last, 0.0) for one in found]), p / 2)
        for word, p in TRUTH.items()
        for last in "ab"
    )
    yield Check("particles are unbiased, default build", worst < 4, f"{worst:.1f} standard errors")
    lowest = min(evenness)
    yield Check(
        "the effective number of particles stays at 2 of 4 or more",
        lowest >= 2 - 1e-9,
        f"{lowest:.2f}",
    )


def _by_hand(
    probabilities: np.ndarray, order: tuple[int, ...], valid: set[int]
) -> tuple[float, int, float, int]:
    """The probability of an order, and the token, weight and number of tests it leads to."""
    probability, left = 1.0, 1.0
    for position in order:
        probability *= float(probabilities[position]) / left if left > 1e-12 else 1.0
        left -= float(probabilities[position])
    refused, weight = 0.0, 1.0
    for rank, position in enumerate(order):
        share = float(probabilities[position]) / (1 - refused)
        if position in valid:
            last = rank + 1 == len(order)
            if not last and order[rank + 1] not in valid:
                weight *= share
            return probability, position, weight, rank + 1 + (not last)
        weight *= 1 - share
        refused += float(probabilities[position])
    raise AssertionError("no token is valid")


@measure(
    "awrs", "distance from the conditional distribution, 12 particles", samples=150, margin=0.15
)
def awrs_loss(samples: int) -> float:
    """Total variation distance. One particle has about 0.5."""
    return distance(Awrs(12), samples)

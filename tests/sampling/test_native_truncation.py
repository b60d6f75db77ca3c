"""Truncated sampling in the kernels against the processors, and where the kernels leave a token to
them."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.kernels.interface import Truncation
from anydecode.kernels.library import load_library, sample_truncated
from anydecode.sampling.min_p import MinP
from anydecode.sampling.noise import Noise
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import Epsilon, TopK, TopP

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the native kernels")

RULES: list[list[LogitsProcessor]] = [
    [TopK(1)],
    [TopK(40)],
    [TopK(2000)],
    [TopP(0.3)],
    [TopP(0.95)],
    [MinP(0.05)],
    [MinP(1e-5)],
    [TopK(20), TopP(0.9)],
    [TopP(0.9), MinP(0.1)],
    [TopK(50), TopP(0.99), MinP(0.02)],
]


def logits_of(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, size).astype(np.float32)
    if kind == "peaked":
        logits[rng.integers(size)] += 25
    if kind == "tied":
        logits = np.round(logits)
    if kind == "masked":
        logits[1:][rng.random(size - 1) < 0.7] = -np.inf
    return logits


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.5])
@pytest.mark.parametrize("size", [5, 257, 3000])
@pytest.mark.parametrize("kind", ["plain", "peaked", "tied", "masked"])
def test_the_kernels_sample_what_the_processors_leave(
    kind: str, size: int, temperature: float
) -> None:
    noise, num_sampled, num_unlike = Noise(7), 0, 0
    for number, rules in enumerate(RULES):
        sampler = Sampler(temperature, post_temperature=rules)
        assert sampler.truncation is not None
        for position in range(20):
            logits = logits_of(kind, size, position)
            expected = sampler.distribution(logits).sample(noise, position, 0)
            assert sampler.sample(logits, noise, position) == expected
            key = (noise.seed, noise.stream, position, 0)
            found = sample_truncated(logits, sampler.truncation, *key)
            assert found in (None, expected), number
            num_sampled += found is not None
            other = sample_truncated(logits, Truncation(temperature, 3), *key)
            num_unlike += other not in (None, expected)
    assert num_sampled > 100
    assert num_unlike or temperature == 0.1 or kind == "peaked"


def test_only_rules_that_the_kernels_know_in_their_order_are_left_to_them() -> None:
    rule = Truncation(0.5, 9, 0.8, 0.1)
    assert Sampler(0.5, (), [TopK(9), TopP(0.8), MinP(0.1)]).truncation == rule
    assert Sampler(0.5, (), [TopP(0.8), TopK(9)]).truncation is None
    assert Sampler(0.5, (), [MinP(0.1), TopP(0.8)]).truncation is None
    assert Sampler(0.5, (), [TopK(9), Epsilon(0.1)]).truncation is None
    assert Sampler(0.0, (), [TopK(9)]).truncation is None and Sampler(0.5).truncation is None


def test_what_rounding_may_decide_is_left_to_the_sampler() -> None:
    logits, key = np.zeros(4, np.float32), (1, 0, 0, 0)
    assert sample_truncated(logits, Truncation(1.0, 0, 0.5), *key) is None  # two of four, or three
    assert sample_truncated(logits, Truncation(1.0, 0, 0.6), *key) in (0, 1, 2)
    many = np.zeros(5000, np.float32)
    assert sample_truncated(many, Truncation(1.0, 0, 0.9), *key) is None
    assert sample_truncated(np.full(4, np.nan, np.float32), Truncation(1.0, 2), *key) is None

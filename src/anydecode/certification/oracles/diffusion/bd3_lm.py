"""Oracle test of bd3-lm (Block Diffusion, arXiv:2503.09573; arXiv:2409.02908): one position per
pass, ordered by the noise of position and step; and an exact cache."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import CONFIDENT, StepState, bidirectional, naive, steps
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Random
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.sampling.noise import Noise


@oracle_test("bd3-lm")
def bd3_lm() -> Iterator[Check]:
    """One position per pass, ordered by the noise of position and step."""

    def rule(state: StepState, seed: int = 6) -> list[int]:
        noise = Noise(seed).with_purpose("unmask")
        return [max(state.probabilities, key=lambda i: noise.coin(i, state.step))]

    with bidirectional(CONFIDENT, block_size=4) as llm:
        for temperature in (0.0, 1.0):
            actual = steps(llm, "bd3-lm", 18, temperature=temperature, seed=6)
            expected = naive(CONFIDENT, 18, 4, rule, aligned=True, temperature=temperature, seed=6)
            yield Check(f"T={temperature} equals the oracle", actual == expected)
        orders = {str(steps(llm, "bd3-lm", 18, seed=seed)[1]) for seed in range(3)}
        yield Check("the order depends on the seed", len(orders) == 3)


@measure(
    "bd3-lm", "tokens that differ from full passes over the same blocks", samples=24, margin=0.0
)
def bd3_lm_cache_loss(samples: int) -> float:
    """The cache is exact: sampled, on a transformer with random weights."""
    return cache_loss(
        "bd3-lm", Denoiser(FixedBlocks(), Random(), ThresholdUnmasking(2.0), NoCache()), samples
    )

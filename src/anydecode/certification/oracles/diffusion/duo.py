"""Oracle test of duo (arXiv:2506.10892): the posterior in the paper's own formula, the psi-sampler,
and, by chi-square, that a model that knows the distribution gives this distribution."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import CONFIDENT, VOCABULARY
from anydecode.certification.oracles.diffusion.gidd import sampled
from anydecode.certification.oracles.diffusion.revised_canvases import (
    IDEAL_CHI_SQUARE,
    MAX_CHI_SQUARE,
    Case,
    Revision,
    Rule,
    equal_canvases,
    ideal_chi_square,
)
from anydecode.certification.oracles.diffusion.task_losses import register_wrong_answers
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK


def noised(state: Revision) -> None:
    """Random tokens in place of all masks."""
    for i, token in enumerate(state.canvas):
        if token == MASK:
            state.canvas[i] = random_token(state, i, 3)


def random_token(state: Revision, position: int, index: int) -> int:
    drawn = int(state.coin(position, index) * (VOCABULARY - 1))
    return drawn + (drawn >= MASK)


def posterior(held: int, clean: np.ndarray, a_t: float, a_s: float) -> np.ndarray:
    """[a_t V x . z + (a_t / a_s - a_t) z + (a_s - a_t) x + (1 - a_t / a_s) (1 - a_s) / V]
    / [a_t V <x, z> + 1 - a_t], over the V tokens that are no mask."""
    size = len(clean) - 1
    z = np.eye(len(clean))[held]
    ratio = a_t / a_s
    uniform = np.full(len(clean), (1 - ratio) * (1 - a_s) / size)
    uniform[MASK] = 0.0
    weights = a_t * size * clean * z + (ratio - a_t) * z + (a_s - a_t) * clean + uniform
    total = a_t * size * clean[held] + 1 - a_t
    result: np.ndarray = np.clip(weights, 0, None) / total
    return result


def ancestral(steps: int, kappa: float) -> Rule:
    def rule(state: Revision) -> bool:
        k = state.block_step
        a_t, a_s = k / steps, (k + 1) / steps
        new = {}
        for i in state.cells:
            clean, held = state.clean(i), state.canvas[i]
            mixed = kappa * posterior(held, clean, a_t, a_s)
            noise = np.full(len(clean), (1 - a_s) / (len(clean) - 1))
            noise[MASK] = 0.0
            mixed += (1 - kappa) * (a_s * posterior(held, clean, a_t, 1.0) + noise)
            new[i] = sampled(state, mixed / mixed.sum(), i)
        for i, token in new.items():
            state.canvas[i] = token
        return k + 1 == steps

    return rule


def reading_out(steps: int, rho: float = 1.0, sigma: float = 0.0) -> Rule:
    """Times from 1 to 0.001, then a sample of the posterior at time 0, whose noise is `sigma` at
    least."""

    def rule(state: Revision) -> bool:
        k, num_samples = state.block_step, steps - 1
        grid = [0.001 + 0.999 * (i / num_samples) ** rho for i in range(num_samples, -1, -1)]
        kept = [1 - 0.999 * time for time in grid]
        if k == num_samples:
            a_t, a_s = float(min(kept[-1], np.exp(-sigma))), 1.0
        else:
            a_t, a_s = kept[k : k + 2]
        new = {i: posterior(state.canvas[i], state.clean(i), a_t, a_s) for i in state.cells}
        for i, row in new.items():
            state.canvas[i] = sampled(state, row / row.sum(), i)
        return k == num_samples

    return rule


@oracle_test("duo")
def duo() -> Iterator[Check]:
    """Every canvas equals the oracle's: ancestral and psi-sampling, blocks, greedy and sampled."""
    scripts = {"drifting": drifting(4.0), "confident": CONFIDENT}
    cases = [
        Case("duo", ancestral(12, 1.0), 12, 12),
        Case("duo:steps=5,block=8", ancestral(5, 1.0), 8, 20),
        Case("duo:steps=6,kappa=0.3", ancestral(6, 0.3), 10, 10),
        Case("duo:steps=4,kappa=0", ancestral(4, 0.0), 10, 10),
        Case("duo:steps=5,read_out=true", reading_out(5), 10, 10),
        Case("duo:steps=6,rho=0.3,read_out=true", reading_out(6, 0.3), 10, 10),
        Case("duo:steps=4,read_out=true,read_out_sigma=4", reading_out(4, 1.0, 4.0), 10, 10),
    ]
    num_changes = yield from equal_canvases(scripts, cases, begin=noised)
    yield Check("tokens change", num_changes > 50, f"{num_changes} changes")


@measure("duo", IDEAL_CHI_SQUARE, samples=400, margin=MAX_CHI_SQUARE)
def duo_distribution(samples: int) -> float:
    """By any number of steps, here 3."""
    return ideal_chi_square("duo:steps=3", samples)


register_wrong_answers("duo", 0.45)

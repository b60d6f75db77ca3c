"""Oracle test of diffusion-gemma: which positions every step accepts and which it draws anew, the
temperatures, and the early end; and steps on a model that is sure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import CONFIDENT, VOCABULARY, entropy_nats, softmax
from anydecode.certification.oracles.diffusion.duo import noised, random_token
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
    traced,
)
from anydecode.certification.oracles.diffusion.task_losses import register_wrong_answers
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.sampling.noise import Noise


def renoising(
    steps: int = 48,
    bound: float = 0.1,
    high: float = 0.8,
    low: float = 0.4,
    stable: int = 1,
    settled: float = 0.005,
) -> Rule:
    """The loop of the published generation code, counting down from N to 1."""

    def rule(state: Revision) -> bool:
        remaining = steps - state.block_step
        temperature = low + (high - low) * remaining / steps
        p = {i: softmax(state.row(i) / np.float32(temperature)) for i in state.cells}
        entropies = {i: entropy_nats(p[i]) for i in state.cells}
        best = [int(p[i].argmax()) for i in state.cells]
        past = state.memory.setdefault("past", [])
        is_stable = len(past) >= stable and all(one == best for one in past[len(past) - stable :])
        mean = sum(entropies.values()) / len(entropies)
        if remaining == 1 or (is_stable and mean < settled):
            for i, token in zip(state.cells, best, strict=True):
                state.canvas[i] = token
            return True
        past.append(best)
        total = 0.0
        new = {}
        for i in sorted(state.cells, key=lambda i: (entropies[i], i)):
            noise = Noise(state.seed).gumbel(range(len(p[i])), i, state.attempt)
            accepted = int((state.row(i) / temperature + noise).argmax())
            new[i] = accepted if total <= bound else random_token(state, i, 4)
            total += entropies[i]
        for i, token in new.items():
            state.canvas[i] = token
        return False

    return rule


def by_position(path: tuple[int, ...]) -> np.ndarray:
    """Logits that are certain and do not depend on the canvas."""
    row = np.zeros(VOCABULARY, np.float32)
    row[7 * path[-1] % 250] = 60.0
    return row


@oracle_test("diffusion-gemma")
def diffusion_gemma() -> Iterator[Check]:
    """Every canvas equals the oracle's: defaults, other bounds and temperatures, blocks."""
    scripts = {"drifting": drifting(4.0), "confident": CONFIDENT, "certain": by_position}
    varied = "diffusion-gemma:steps=9,first_temperature=1.5,last_temperature=0.2,stable=3"
    cases = [
        Case("diffusion-gemma", renoising(), 10, 10),
        Case("diffusion-gemma:steps=7,block=8,bound=2", renoising(7, 2.0), 8, 20),
        Case(varied, renoising(9, 0.1, 1.5, 0.2, 3), 12, 12),
        Case("diffusion-gemma:settled=1.5", renoising(settled=1.5), 10, 10),
    ]
    num_changes = yield from equal_canvases(scripts, cases, (0.0,), noised)
    yield Check("tokens change", num_changes > 50, f"{num_changes} changes")
    certain = len(traced("diffusion-gemma", by_position, 12, seed=3))
    yield Check("a stable canvas of low entropy ends early", certain == 2, f"{certain} steps")


@measure("diffusion-gemma", "steps of a canvas of certain tokens", samples=4, margin=2.0)
def diffusion_gemma_steps(samples: int) -> float:
    """Two of at most 48: one to predict, one to see that nothing has changed."""
    return float(
        np.mean([len(traced("diffusion-gemma", by_position, 12, seed=n)) for n in range(samples)])
    )


register_wrong_answers("diffusion-gemma", 0.35)

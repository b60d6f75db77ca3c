"""Oracle test of gidd (arXiv:2503.04482): the reverse step by Bayes' rule over all states,
self-correction, and accuracy on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    VOCABULARY,
    Logits,
    dense,
    softmax,
)
from anydecode.certification.oracles.diffusion.revised_canvases import (
    IDEAL_CHI_SQUARE,
    MAX_CHI_SQUARE,
    Case,
    Revision,
    Rule,
    equal_canvases,
    ideal_chi_square,
    traced,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK
from anydecode.sampling.noise import Noise

#: The share of random tokens in the noise of `ideal`.
_SHARE = 0.2


def marginal(t: float, uniform: float, size: int) -> tuple[float, np.ndarray]:
    """The share of the token, and the noise at time t."""
    c = 2 * uniform / (1 - uniform) * t**0.5 * (1 - t) ** 0.5
    noise = np.full(size, c / (1 + c) / (size - 1))
    noise[MASK] = t / (1 + c)
    return (1 - t) / (1 + c), noise


def bayes(
    held: int,
    clean: np.ndarray,
    now: tuple[float, np.ndarray],
    later: tuple[float, np.ndarray],
) -> np.ndarray:
    """The distribution at time s, by the transition matrix from s to t and Bayes' rule."""
    (a_t, n_t), (a_s, n_s) = now, later
    transition = np.eye(len(clean))[held] * (a_t / a_s) + (n_t - a_t / a_s * n_s)[held]
    joint = np.clip(transition, 0, None) * (a_s * clean + n_s)
    if joint.sum() == 0:
        joint[held] = 1.0
    result: np.ndarray = joint / joint.sum()
    return result


def sampled(state: Revision, distribution: np.ndarray, position: int) -> int:
    support = np.flatnonzero(distribution)
    noise = Noise(state.seed).gumbel(support, position, state.attempt)
    return int(support[(np.log(distribution[support]) + noise).argmax()])


def interpolating(steps: int, uniform: float, corrections: int, temperature: float = 0.1) -> Rule:
    def rule(state: Revision) -> bool:
        k, memory = state.block_step, state.memory
        if k < steps:
            rows = {}
            for i in state.cells:
                clean = state.clean(i)
                now, later = (marginal(1 - n / steps, uniform, len(clean)) for n in (k, k + 1))
                rows[i] = sampled(state, bayes(state.canvas[i], clean, now, later), i)
            for i, token in rows.items():
                state.canvas[i] = token
            return k + 1 == steps and not corrections
        hits = sum(int(state.row(i).argmax()) == state.canvas[i] for i in state.cells)
        memory["stale"] = 0 if hits > memory.get("best", -1) else memory["stale"] + 1
        memory["best"] = max(hits, memory.get("best", -1))
        scores, tokens = {}, {}
        for i in state.cells:
            row = state.row(i)
            noise = Noise(state.seed).gumbel(range(len(row)), i, state.attempt)
            tokens[i] = int((row / temperature + noise).argmax())
            sure = float(softmax(row / np.float32(temperature))[tokens[i]])
            scores[i] = sure if tokens[i] != state.canvas[i] else 0.0
        best = max(state.cells, key=lambda i: (scores[i], -i))
        if not scores[best] or memory["stale"] >= 32:
            return True
        state.canvas[best] = tokens[best]
        return k + 1 - steps >= corrections

    return rule


@oracle_test("gidd")
def gidd() -> Iterator[Check]:
    """Every canvas equals the oracle's: mixtures of noise, blocks, greedy and sampled."""
    scripts = {"drifting": drifting(0.4), "dense": dense(spread=0.5)}
    varied = "gidd:uniform=0.4,steps=8,corrections=5,block=8"
    cases = [
        Case("gidd:steps=6", interpolating(6, 0.1, 128), 16, 16),
        Case(varied, interpolating(8, 0.4, 5), 8, 16),
        Case("gidd:corrections=0", interpolating(14, 0.1, 0), 14, 14),
        Case("gidd:uniform=0,steps=5,corrections=9", interpolating(5, 0.0, 9), 12, 12),
    ]
    num_returns = yield from equal_canvases(scripts, cases)
    yield Check("tokens change", num_returns > 50, f"{num_returns} changes")
    settled = traced("gidd:steps=4,corrections=100", lambda path: CONFIDENT(path[-1:]), 16, seed=1)
    yield Check("a block ends when nothing changes", len(settled) < 20, f"{len(settled)} steps")


@measure("gidd", IDEAL_CHI_SQUARE, samples=400, margin=MAX_CHI_SQUARE)
def gidd_distribution(samples: int) -> float:
    """Of ancestral sampling, by any number of steps, here 3; corrections seek likelier tokens."""
    return ideal_chi_square("gidd:steps=3,corrections=0", samples)


@measure(
    "gidd", "wrong texts that self-correction leaves, relative to before", samples=60, margin=0.2
)
def gidd_corrections(samples: int) -> float:
    """Of texts that 3 steps sample from the ideal model of the noise: the posterior of 24 known
    texts given a canvas of masks and random tokens."""
    texts = np.random.default_rng(5).integers(97, 105, (24, 10))
    known = {tuple(text) for text in texts.tolist()}
    wrong = []
    for corrections in (0, 128):
        decoder = f"gidd:steps=3,uniform={_SHARE},corrections={corrections}"
        answers = [
            traced(decoder, ideal(texts), 10, temperature=1.0, seed=seed)[-1]
            for seed in range(samples)
        ]
        wrong.append(sum(tuple(answer) not in known for answer in answers))
    return wrong[1] / wrong[0]


def ideal(texts: np.ndarray) -> Logits:
    """The logits of the model that knows the noise: log p(token | canvas), for equally likely
    `texts`, int `[count, length]`, and a time that is not known."""
    levels = [marginal(t, _SHARE, VOCABULARY) for t in np.linspace(0.05, 0.95, 10)]

    @cache
    def posterior(held: tuple[int, ...]) -> np.ndarray:
        """The probability of each text."""
        canvas = np.array(held)
        total = np.zeros(len(texts))
        for share, noise in levels:
            total += (share * (texts == canvas) + noise[canvas]).prod(1)
        result: np.ndarray = total / total.sum()
        return result

    def logits(path: tuple[int, ...]) -> np.ndarray:
        *seen, position = path
        weights = posterior(tuple(seen[len(PROMPT) :]))
        row = np.full(VOCABULARY, 1e-9)
        np.add.at(row, texts[:, position - len(PROMPT)], weights)
        return np.log(row).astype(np.float32)

    return logits


register_losses(
    "gidd",
    "gidd:uniform=0,steps=16,corrections=0",  # tiny-diffusion is trained with masks only
    accuracy=0.1,
    passes=0.7,
    tasks=DETERMINED,
)

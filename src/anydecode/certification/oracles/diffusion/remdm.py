"""Oracle test of remdm (arXiv:2503.00307): the canvas after every step for each strategy; that the
expected share of tokens is kept; and accuracy on tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import CONFIDENT, accuracy_lost
from anydecode.certification.oracles.diffusion.revised_canvases import (
    Case,
    Revision,
    Rule,
    equal_canvases,
    returns,
    traced,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.models.scripted import MASK

DEFAULTS = {"cap": 0.008, "rescale": 0.015, "conf": 0.0, "loop": 0.02, "backward": 0.0}


def alpha(strategy: str, t: float) -> float:
    """The expected share of tokens at time t."""
    if strategy != "loop":
        return 1.0 - t
    if t >= 0.55:
        return 0.9 * (1 - t) / 0.45
    return 0.9 if t >= 0.05 else 0.9 + 0.1 * (1 - t / 0.05)


def remasking(strategy: str, eta: float, steps: int) -> Rule:
    """The transition of the paper, position by position."""

    def rule(state: Revision) -> bool:
        k = state.block_step
        a_t, a_s = (alpha(strategy, 1 - n / steps) for n in (k, k + 1))
        limit = 1.0 if a_t == 0 else min(1.0, (1 - a_s) / a_t)
        held = state.memory.setdefault("confidence", {})
        tokens = [i for i in state.cells if state.canvas[i] != MASK]
        total = sum(math.exp(-held[i]) for i in tokens)
        new = {}
        for i in state.cells:
            if strategy == "conf":
                sigma = limit * math.exp(-held[i]) / total if i in tokens else 0.0
            elif strategy == "cap":
                sigma = min(eta, limit)
            elif strategy == "rescale":
                sigma = eta * limit
            elif strategy == "backward":
                sigma = limit if a_t == 0 else min(limit, (a_s - a_t) / a_t)
            else:
                sigma = min(eta, limit) if a_t == a_s == 0.9 else 0.0
            coin = state.coin(i, 2)
            if i in tokens:
                new[i] = MASK if coin < sigma else state.canvas[i]
            else:
                fills = (a_s - (1 - sigma) * a_t) / (1 - a_t)
                new[i] = state.token(i) if coin < fills else MASK
                if new[i] != MASK:
                    held[i] = state.probability(i, new[i])
        for i, token in new.items():
            state.canvas[i] = token
        return k + 1 == steps

    return rule


@oracle_test("remdm")
def remdm() -> Iterator[Check]:
    """Every strategy, its published eta, whole canvases and blocks, greedy and sampled."""
    num_returns = {}
    for strategy, eta in DEFAULTS.items():
        decoder = f"remdm:strategy={strategy}"
        cases = [
            Case(decoder, remasking(strategy, eta, 30), 30, 30),
            Case(f"{decoder},eta=0.4,steps=12,block=10", remasking(strategy, 0.4, 12), 10, 20),
            Case(f"{decoder},steps=40", remasking(strategy, eta, 40), 20, 20),
        ]
        num_greedy = yield from equal_canvases({"confident": CONFIDENT}, cases, (0.0,))
        num_sampled = yield from equal_canvases({"drifting": drifting(4.0)}, cases, (0.8,))
        num_returns[strategy] = num_greedy + num_sampled
    for strategy, count in num_returns.items():
        yield Check(f"{strategy}: tokens are masked again", count > 0, f"{count} returns")
    ancestral = traced("remdm:eta=0", CONFIDENT, 24, seed=3)
    yield Check("with eta=0 no token is masked again", returns(ancestral) == 0)
    yield _kept_share()


def _kept_share() -> Check:
    """The share of tokens after half of the steps, over many seeds, is that of the schedule."""
    shares = []
    for seed in range(60):
        history = traced("remdm:eta=0.5,steps=8", lambda path: CONFIDENT(path[-1:]), 24, seed=seed)
        shares.append(sum(token >= 0 for token in history[3]) / 24)
    mean = sum(shares) / len(shares)
    return Check(
        "remasking keeps the expected share of tokens", abs(mean - 0.5) < 0.04, f"{mean:.3f}"
    )


@measure("remdm", "accuracy lost against one token per pass", samples=48, margin=0.3)
def remdm_loss(samples: int) -> float:
    """Ancestral sampling takes masks in a random order, which costs accuracy."""
    return accuracy_lost("remdm:steps=32", samples, DETERMINED)

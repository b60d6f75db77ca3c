"""Drafters that read their target's states: the target's states, position by position, and the
comparison of the drafted trees with an oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from anydecode.certification.checks import Check
from anydecode.certification.oracles.speculative.company import company_checks
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.rounds import TracedRound, accepted, rounds
from anydecode.certification.tiny import with_drafter
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network
from anydecode.sampling.noise import Noise

PROMPTS = ("the cat sat on the cat", "a quick zebra")
Path = tuple[int, ...]
Drafter = Callable[[Network], Checkpoint]
#: The drafted paths after a text, from (checkpoint, target, text, temperature).
Oracle = Callable[[Checkpoint, Network, list[int], float], list[Path]]


class TargetStates(Forward):
    """The target, which returns its hidden states after every number of layers."""

    def states(self, token: int) -> list[np.ndarray]:
        states = [self._embedding(token)]
        for layer in range(len(self.weights.layers)):
            x = states[-1] + self._attention(states[-1], layer)
            states.append(x + self._mlp(x, layer))
        return states

    def normed(self, x: np.ndarray) -> np.ndarray:
        return self._normed(x, self.weights.final_norm)


def shares(logits: np.ndarray, temperature: float, position: int) -> list[tuple[int, float]]:
    """The 64 most probable tokens with their shares of the keys, by descending share."""
    row = logits / (temperature or 1.0)
    top = np.sort(np.argsort(-row, kind="stable")[:64])
    keys = row[top] - row[top].max()
    keys -= np.log(np.exp(keys).sum())
    if temperature:
        keys = keys + Noise(5).gumbel(top, position)
    weights = np.exp(keys - keys.max())
    weights /= weights.sum()
    order = np.argsort(-keys)
    return [(int(top[i]), float(weights[i])) for i in order]


def best_paths(
    logits: Callable[[Path], np.ndarray], length: int, temperature: float, size: int, depth: int
) -> list[Path]:
    """The `size` paths of up to `depth` tokens with the largest products of shares, by a best-first
    search. `logits(path)` are those after a path behind a text of `length` tokens."""
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    paths: list[Path] = []
    while heap and len(paths) < size:
        weight, path = heappop(heap)
        if path:
            paths.append(path)
        if len(path) < depth:
            for token, share in shares(logits(path), temperature, length + len(path)):
                heappush(heap, (weight * share, (*path, token)))
    return paths


def compare_trees(
    name: str, key: str, drafter: Drafter, oracle: Oracle, *, is_accepted: bool = True
) -> Iterator[Check]:
    """Checks that every tree that `key` drafts with a drafter equals the oracle's, and texts that
    are generated together on the default draft policy.

    Args:
        name: The drafter's name.
        key: The method.
        drafter: Makes the drafter's files for a target.
        oracle: The expected paths.
        is_accepted: Whether drafts must be accepted.
    """
    open_llm = partial(with_drafter, drafter, cache_positions=1024, prefix_cache=False)
    for temperature in (0.0, 0.8):
        trace: list[TracedRound] = []
        with open_llm() as llm:
            for prompt in PROMPTS:
                trace += rounds(llm, key, prompt, 16, temperature=temperature)
            network: Network = llm.model.network  # type: ignore[attr-defined]
            checkpoint = drafter(network)
            options: dict[str, Any] = {
                "max_tokens": 16,
                "temperature": temperature,
                "seed": 5,
                "ignore_eos": True,
            }
            plain = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        first, others = trace[0], [one for one in trace if one.tokens]
        wrong = [
            one
            for one in others
            if set(one.paths) != set(oracle(checkpoint, network, one.text, temperature))
        ]
        about = f"{key}, {name}, T={temperature}"
        detail = f"{len(wrong)} of {len(others)} differ"
        yield Check(f"{about}: trees equal the oracle's", not wrong and len(others) > 5, detail)
        if is_accepted:
            count = accepted(trace)
            yield Check(f"{about}: drafts are accepted", count > 5, str(count))
            yield from company_checks(about, open_llm, key, PROMPTS, plain, **options)
        yield Check(f"{about}: nothing is drafted before the first pass", not first.tokens)

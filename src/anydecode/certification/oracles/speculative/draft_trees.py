"""Trees of a scripted draft model: its rows are recomputed from whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from anydecode.certification.checks import Check
from anydecode.certification.rounds import TracedRound, accepted, blurred, rounds, scripted, wordy
from anydecode.sampling.noise import Noise

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


TARGET, DRAFT = wordy(spread=1.8), blurred(wordy(spread=1.8), error=0.7)


Path = tuple[int, ...]


Oracle = Callable[[list[int], float], list[Path]]


def draft_row(text: list[int], path: Path, temperature: float) -> dict[int, tuple[float, float]]:
    """Token to (probability, key): the 64 most probable tokens, normalized, by descending key."""
    row = DRAFT((*text, *path)).astype(float) / (temperature or 1.0)
    top = np.sort(np.argsort(-row, kind="stable")[:64])
    q = np.exp(row[top] - row.max())
    q /= q.sum()
    keys = np.log(q)
    if temperature:
        keys = keys + Noise(5).gumbel(top, len(text) + len(path))
    order = np.argsort(-keys)
    return {int(top[i]): (float(q[i]), float(keys[i])) for i in order}


def compare_trees(
    key: str, oracle: Oracle, ordered: bool = True, temperatures: tuple[float, ...] = (0.0, 0.8)
) -> Iterator[Check]:
    """Checks that every tree that `key` drafts equals the oracle's; with `ordered`, node by
    node."""
    for temperature in temperatures:
        with scripted(TARGET, DRAFT) as llm:
            trace: list[TracedRound] = []
            for prompt in PROMPTS:
                trace += rounds(llm, key, prompt, 24, temperature=temperature)
        wrong = 0
        for one in trace:
            expected = oracle(one.text, temperature)
            same = one.paths == expected if ordered else set(one.paths) == set(expected)
            wrong += not same or len(one.paths) != len(expected)
        yield Check(
            f"{key} at T={temperature} equals the oracle", wrong == 0, f"{len(trace)} trees"
        )
        deep = max(len(path) for one in trace for path in one.paths)
        yield Check(f"{key} at T={temperature} drafts deeper than one level", deep > 1, f"{deep}")
        yield Check(f"{key} at T={temperature}: drafts are accepted", accepted(trace) > 0)

"""Oracle test of aded (Adaptive Draft-Verification, arXiv:2407.12021): the trees of the search,
from its definition, over a table replayed from the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.lookahead import PROMPTS
from anydecode.certification.rounds import rounds, scripted, wordy


@oracle_test("aded")
def aded() -> Iterator[Check]:
    """Trees equal a replay of the search from its definition, over a table replayed from the
    rounds."""
    logits = wordy()
    for temperature in (0.0, 0.8):
        table: dict[tuple[int, int], dict[int, float]] = {}
        wrong, total = 0, 0
        with scripted(logits) as llm:
            for prompt in PROMPTS:
                for one in rounds(llm, "aded", prompt, temperature=temperature):
                    wrong += one.paths != _search(one.text, table, 6, 4)
                    total += len(one.accepted)
                    for path in [(), *one.paths]:
                        text = [*one.text, *path]
                        if len(text) > 1:
                            table[text[-2], text[-1]] = _top(logits(tuple(text)))
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", total > 0, f"{total}")


def _top(row: np.ndarray) -> dict[int, float]:
    best = np.argsort(-row, kind="stable")[:8]
    weights = np.exp(row[best].astype(float) - float(row.max()))
    return {int(t): float(w) for t, w in zip(best, weights / weights.sum(), strict=True)}


def _shares(
    text: list[int], tail: tuple[int, ...], table: dict[tuple[int, int], dict[int, float]]
) -> dict[int, float]:
    before, last = [*text, *tail][-2:]
    if (before, last) in table:
        return table[before, last]
    follow = [text[i] for i in range(2, len(text)) if text[i - 2 : i] == [before, last]]
    ranked = sorted(dict.fromkeys(follow), key=lambda t: -follow.count(t))[:8]
    return {t: follow.count(t) / len(follow) for t in ranked}


def _search(
    text: list[int], table: dict[tuple[int, int], dict[int, float]], size: int, depth: int
) -> list[tuple[int, ...]]:
    """All simulations as (path, value); visits and means are recomputed from this list."""
    if len(text) < 2:
        return []
    runs: list[tuple[tuple[int, ...], float]] = []
    nodes: list[tuple[int, ...]] = []
    for _ in range(2 * size):
        path: tuple[int, ...] = ()
        value = 1.0
        while len(path) < depth:
            shares = _shares(text, path, table)
            if not shares:
                break

            scores = _scores(runs, path, shares)
            token = max(shares, key=scores.__getitem__)
            value *= shares[token]
            path = (*path, token)
            if path not in nodes:
                nodes.append(path)
                break
        if not path:
            break
        runs.append((path, value))
        if len(nodes) >= size:
            break
    return nodes


def _scores(
    runs: list[tuple[tuple[int, ...], float]], path: tuple[int, ...], shares: dict[int, float]
) -> dict[int, float]:
    """The mean value of the runs through each child plus its exploration term."""
    through = {t: [v for run, v in runs if run[: len(path) + 1] == (*path, t)] for t in shares}
    total = sum(map(len, through.values()))
    explore = sqrt(max(total, 1)) * (1.25 + log((total + 19653) / 19652))
    return {
        token: (sum(values) / len(values) if values else 0.0)
        + shares[token] * explore / (1 + len(values))
        for token, values in through.items()
    }

"""Oracle tests of Jacobi iteration, lookahead and ADED's search, from their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import (
    TracedRound,
    accepted,
    plain_token,
    rounds,
    scripted,
    wordy,
)

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


@oracle_test("jacobi")
def jacobi() -> Iterator[Check]:
    """Iterates of a block equal y_i = sample(x, y before i) applied to the whole block."""
    logits = wordy()
    for name, block, length in (("plain", 0, None), ("blocks", 5, None), ("hybrid", 5, 12)):
        for temperature in (0.0, 0.8):
            decoder = f"jacobi:block={block},pad=97" + (f",length={length}" if length else "")
            wrong, total = 0, 0
            with scripted(logits) as llm:
                for prompt in PROMPTS:
                    trace = rounds(llm, decoder, prompt, 24, temperature=temperature)
                    wrong += not _iterates(trace, len(prompt), block or 24, length, temperature)
                    total += accepted(trace)
            yield Check(f"{name}, T={temperature} equals the iteration", wrong == 0)
            yield Check(f"{name}, T={temperature}: drafts are accepted", total > 0, f"{total}")
            yield Check("no block takes more passes than it has tokens", len(trace) <= 24)


def _iterates(
    trace: list[TracedRound], prompt: int, block: int, length: int | None, temperature: float
) -> bool:
    """Whether each round drafts the part of the block's iterate that is not fixed yet."""
    logits, rest = wordy(), list(trace)
    while rest:
        start = len(rest[0].text)
        size = min(block, prompt + 24 - start)
        if length is not None:
            size = max(1, min(size, prompt + length - start))
        iterate = [97] * size
        fixed = 0
        while fixed < size:
            one = rest.pop(0)
            if one.tokens != iterate[fixed : size - 1]:
                return False
            seen = one.text[:start]
            iterate = [
                plain_token(logits((*seen, *iterate[:i])), start + i, temperature)
                for i in range(size)
            ]
            fixed += len(one.generated)
            if iterate[:fixed] != [*one.text, *one.generated][start:][:fixed]:
                return False
    return True


@oracle_test("lookahead")
def lookahead() -> Iterator[Check]:
    """Window, n-gram pool and guesses equal a replay of the two-dimensional window."""
    total = 0
    with scripted(wordy()) as llm:
        for prompt in PROMPTS:
            trace = rounds(llm, "lookahead:window=3,ngram=3,max_ngrams=2", prompt)
            yield Check(f"{prompt!r} equals the replay", _replays(trace))
            total += accepted(trace)
    yield Check("drafts are accepted", total > 0, f"{total}")


def _replays(trace: list[TracedRound]) -> bool:
    """Three columns, 3-grams, two guesses: levels[r][c] is r + c + 1 positions after the text."""
    logits = wordy()
    pool: list[tuple[int, ...]] = []
    levels: list[list[int]] = []
    for one in trace:
        text = one.text
        filler = [text[(i * 7919 + len(text)) % len(text)] for i in range(3)]
        levels = levels or [filler]
        guesses = [gram[1:] for gram in reversed(pool) if gram[0] == text[-1]][:2]
        guessed = {path[:n] for path in guesses for n in (1, 2)}
        inputs = [
            [
                (*levels[0][: column + 1], *(level[column] for level in levels[1 : row + 1]))
                for column in range(3)
            ]
            for row in range(len(levels))
        ]
        window = [path for row in inputs for path in row]
        if set(one.paths) != guessed | set(window) or one.paths[-len(window) :] != window:
            return False
        fresh = [int(logits((*text, *path)).argmax()) for path in inputs[-1]]
        if len(levels) == 2:
            for column, token in enumerate(fresh):
                gram = (levels[0][column], levels[1][column], token)
                pool = [other for other in pool if other != gram]
                same = [other for other in pool if other[0] == gram[0]]
                if len(same) == 2:
                    pool.remove(same[0])
                pool.append(gram)
        levels = [*levels, fresh][-2:]
        shift = len(one.generated) - 1
        levels = [(level[shift:] + filler)[:3] for level in levels]
    return True


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

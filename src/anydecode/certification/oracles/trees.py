"""Oracle tests of draft trees: the draft model's rows are recomputed from whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import TracedRound, accepted, blurred, rounds, scripted, wordy
from anydecode.decoders.speculative.fixed_tree import DEFAULT
from anydecode.decoders.speculative.rsd import condition_on_parent
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


def compare_trees(key: str, oracle: Oracle, ordered: bool = True) -> Iterator[Check]:
    """Checks that every tree that `key` drafts equals the oracle's; with `ordered`, node by
    node."""
    for temperature in (0.0, 0.8):
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


@oracle_test("opt-tree")
def opt_tree() -> Iterator[Check]:
    """The n most probable nodes of the whole tree; levels are added while they add more than
    delta."""

    def oracle(text: list[int], temperature: float) -> list[Path]:
        before, nodes = 0.0, []
        for depth in range(1, 11):
            nodes = _likeliest(text, temperature, 8, depth)
            total = sum(weight for weight, _ in nodes)
            if total - before <= 0.2:
                break
            before = total
        return [path for _, path in nodes]

    yield from compare_trees("opt-tree:size=8,delta=0.2", oracle, ordered=False)


def _likeliest(
    text: list[int], temperature: float, size: int, depth: int
) -> list[tuple[float, Path]]:
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    nodes: list[tuple[float, Path]] = []
    while heap and len(nodes) <= size:
        negative, path = heappop(heap)
        nodes.append((-negative, path))
        if len(path) < depth:
            row = draft_row(text, path, temperature)
            keys = np.array([key for _, key in row.values()])
            beliefs = np.exp(keys - keys.max())
            for token, belief in zip(row, beliefs / beliefs.sum(), strict=True):
                heappush(heap, (negative * float(belief), (*path, token)))
    return nodes[1:]


@oracle_test("dyspec")
def dyspec() -> Iterator[Check]:
    """The paper's heap: one sample at a time, residuals as whole vectors."""

    def oracle(text: list[int], temperature: float) -> list[Path]:
        def slot(path: Path) -> tuple[list[int], np.ndarray]:
            row = draft_row(text, path, temperature)
            return list(row), np.array([q for q, _ in row.values()])

        heap: list[tuple[float, int, Path, list[int], np.ndarray]] = []
        count = 0
        tree: list[Path] = []
        heappush(heap, (-1.0, count, (), *slot(())))
        while len(tree) < 10:
            negative, _, parent, tokens, residual = heappop(heap)
            share = residual[0] / residual.sum()
            tree.append((*parent, tokens[0]))
            count += 1
            heappush(heap, (negative * (1 - share), count, parent, tokens[1:], residual[1:]))
            count += 1
            heappush(heap, (negative * share, count, tree[-1], *slot(tree[-1])))
        return tree

    yield from compare_trees("dyspec:size=10", oracle)


@oracle_test("rsd")
def rsd() -> Iterator[Check]:
    """Gumbel-top-k per node; stochastic beams with the paper's formula."""
    keys = np.array([0.3, 2.0, -1.0])
    naive = -np.log(np.exp(-0.5) - np.exp(-2.0) + np.exp(-keys))
    yield Check(
        "conditioned keys equal the formula",
        np.allclose(condition_on_parent(0.5, keys), naive),
    )
    yield Check(
        "the largest key becomes the parent's key", condition_on_parent(0.5, keys)[1] == 0.5
    )
    yield Check(
        "no overflow for large keys",
        bool(np.isfinite(condition_on_parent(800.0, np.array([-700.0, 5.0]))).all()),
    )

    def branching(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        level: list[Path] = [()]
        for count in (3, 2, 1):
            level = [
                (*path, token)
                for path in level
                for token in list(draft_row(text, path, temperature))[:count]
            ]
            tree += level
        return tree

    def beams(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        level: list[tuple[float, float, Path]] = [(0.0, 0.0, ())]
        for _ in range(3):
            options = []
            for above, log, path in level:
                row = draft_row(text, path, temperature)
                raw = np.array([log + key for _, key in row.values()])
                shifted = raw
                if temperature:
                    inner = np.exp(-above) - np.exp(-raw.max()) + np.exp(-raw)
                    shifted = -np.log(inner)
                for key, (token, (q, _)) in zip(shifted, row.items(), strict=True):
                    options.append((float(key), log + float(np.log(q)), (*path, token)))
            level = sorted(options, key=lambda option: -option[0])[:4]
            tree += [path for _, _, path in level]
        return tree

    yield from compare_trees("rsd:branching=3-2-1", branching)
    yield from compare_trees("rsd:width=4,depth=3", beams)


@oracle_test("fixed-tree")
def fixed_tree() -> Iterator[Check]:
    """Rank paths filled with the draft model's tokens."""

    def oracle(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        for ranks in DEFAULT.split():
            path: Path = ()
            for rank in ranks:
                path = (*path, list(draft_row(text, path, temperature))[int(rank)])
            tree.append(path)
        return tree

    yield from compare_trees("fixed-tree", oracle)


def _latest(text: list[int]) -> list[int]:
    for n in (3, 2, 1):
        for start in range(len(text) - n - 1, -1, -1):
            if n < len(text) and text[start : start + n] == text[-n:]:
                return text[start + n : start + n + 20]
    return []


def _first(text: list[int]) -> list[int]:
    for start in range(len(text) - 3):
        if text[start : start + 3] == text[-3:]:
            return text[start + 3 : start + 23]
    return []


@oracle_test("taps")
def taps() -> Iterator[Check]:
    """Merged trees contain every drafter's paths once; routing uses the drafter with the best
    acceptance."""
    parts = {"prompt-lookup": _latest, "copyspec": _first}
    for route in ("false", "true"):
        with scripted(wordy()) as llm:
            decoder = f"taps:drafters=prompt-lookup+copyspec,route={route},size=40"
            trace = rounds(llm, decoder, PROMPTS[0], 120)
        scores = {key: [1.0, 2.0] for key in parts}
        wrong, both = 0, 0
        for one in trace:
            drafts = {key: part(one.text)[:20] for key, part in parts.items()}
            ranked = sorted(scores, key=lambda key: -scores[key][0] / scores[key][1])
            used = [key for key in ranked if drafts[key]]
            both += len(used) == 2 and drafts[used[0]] != drafts[used[1]]
            used = used[:1] if route == "true" else used
            expected = {
                tuple(drafts[key][: n + 1]) for key in used for n in range(len(drafts[key]))
            }
            wrong += {path for path in one.paths if len(path) <= 20} != expected
            wrong += len(set(one.paths)) != len(one.paths)
            for key, score in scores.items():
                if drafts[key]:
                    score[0] = 0.9 * score[0] + (drafts[key][0] == one.generated[0])
                    score[1] = 0.9 * score[1] + 1
        yield Check(f"route={route} equals the oracle", wrong == 0 and both > 0, f"{both} differ")
        yield Check(f"route={route}: drafts are accepted", accepted(trace) > 0)
    sources = {source for one in trace for source in one.entry["sources"] or ()}
    yield Check("nodes name their drafter", sources == set(parts), f"{sources}")

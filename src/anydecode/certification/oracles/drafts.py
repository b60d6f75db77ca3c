"""Oracle tests of drafters without a model: the oracles search the whole text in every round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import Logits, TracedRound, accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.copyspec import RollingIndex
from anydecode.decoders.speculative.stand import NgramProbabilities
from anydecode.decoders.speculative.suffix import SuffixAutomaton
from anydecode.decoders.speculative.token_recycling import PUBLISHED
from anydecode.sampling.noise import Noise

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaa", "h")
Chain = Callable[[list[int], int], list[int]]


def compare_chains(
    key: str, oracle: Chain, prompts: tuple[str, ...] = PROMPTS, echo: int = 0
) -> Iterator[Check]:
    """Checks that every drafted chain of `key` equals `oracle(text, prompt length)`."""
    total = 0
    for temperature in (0.0, 0.8):
        with scripted(wordy(echo=echo)) as llm:
            for prompt in prompts:
                trace = rounds(llm, key, prompt, temperature=temperature)
                wrong = [one for one in trace if one.tokens != oracle(one.text, len(prompt))]
                total += accepted(trace)
                yield Check(f"{prompt!r} at T={temperature} equals the oracle", not wrong)
    yield Check("drafts are accepted", total > 0, f"{total}")


@oracle_test("prompt-lookup")
def prompt_lookup() -> Iterator[Check]:
    """The longest suffix, its latest earlier occurrence, and the tokens after it."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        for n in (3, 2, 1):
            for start in range(len(text) - n - 1, -1, -1):
                if n < len(text) and text[start : start + n] == text[-n:]:
                    return text[start + n : start + n + 7]
        return []

    yield from compare_chains("prompt-lookup", oracle)


@oracle_test("copyspec")
def copyspec() -> Iterator[Check]:
    """The first earlier occurrence of the last three tokens; hash collisions do no harm."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        for start in range(len(text) - 3):
            if text[start : start + 3] == text[-3:]:
                return text[start + 3 : start + 13]
        return []

    yield from compare_chains("copyspec", oracle)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, 200).tolist()
    index, agree = RollingIndex(3, modulus=7), True
    for position, token in enumerate(text):
        index.extend([token])
        prefix = text[: position + 1]
        earlier = [s for s in range(len(prefix) - 3) if prefix[s : s + 3] == prefix[-3:]]
        agree &= index.match() == (earlier[0] if earlier else None)
    yield Check("a hash of 7 values finds the right positions", agree)


@oracle_test("aggressive")
def aggressive() -> Iterator[Check]:
    """Copies while the output follows the input; restarts at a suffix that occurs once in the
    input."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        source, output = text[:prompt], text[prompt:]
        position: int | None = None
        for end in range(1, len(output) + 1):
            if position is not None and source[position : position + 1] == [output[end - 1]]:
                position += 1
                continue
            position = None
            for n in range(1, end + 1):
                tail = output[end - n : end]
                ends = [e for e in range(n, prompt + 1) if source[e - n : e] == tail]
                if len(ends) == 1:
                    position = ends[0]
                if len(ends) <= 1:
                    break
        return [] if position is None else source[position : position + 16]

    prompts = ("abcdefghijkl", "kacadaeafalb", "aabbccddabcd")
    yield from compare_chains("aggressive", oracle, prompts, echo=12)


@oracle_test("suffix")
def suffix() -> Iterator[Check]:
    """The automaton counts every substring; the tree takes the most probable nodes first."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 3, 60).tolist()
    automaton, agree = SuffixAutomaton(), True
    for token in text:
        automaton.extend(token)
    for length in range(1, 8):
        for start in range(len(text) - length + 1):
            state, part = 0, text[start : start + length]
            for token in part:
                state = automaton.next[state][token]
            count = sum(text[s : s + length] == part for s in range(len(text) - length + 1))
            agree &= automaton.counts[state] == count
    yield Check("substring counts equal a search", agree)
    total = 0
    with scripted(wordy()) as llm:
        for prompt in PROMPTS:
            trace = rounds(llm, "suffix:memory=0", prompt)
            total += accepted(trace)
            wrong = [one for one in trace if sorted(one.paths) != sorted(_likeliest(one.text))]
            yield Check(f"{prompt!r} drafts the most probable continuations", not wrong)
    yield Check("drafts are accepted", total > 0, f"{total}")
    with scripted(wordy()) as llm:
        cold = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        warm = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("earlier outputs are remembered", warm.stats.passes < cold.stats.passes)
        llm.clear()
        again = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("`clear` forgets them", again.stats.passes == cold.stats.passes)


def _likeliest(text: list[int]) -> list[tuple[int, ...]]:
    """Up to 8 continuations of the longest repeated suffix with probability of at least 0.1, at
    most twice as long as the suffix, most probable first (found by search)."""

    def positions(part: list[int]) -> list[int]:
        return [e for e in range(len(part), len(text) + 1) if text[e - len(part) : e] == part]

    match: list[int] = next(
        (text[-n:] for n in range(len(text) - 1, 0, -1) if len(positions(text[-n:])) > 1), []
    )
    share: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)] if match else []
    for _ in range(2 * len(match)):
        grown = []
        for path, weight in level:
            part = match + list(path)
            count = len(positions(part))
            for token in dict.fromkeys(text[e] for e in positions(part) if e < len(text)):
                value = weight * len(positions([*part, token])) / count
                if value >= 0.1:
                    grown.append(((*path, token), value))
        share.update(grown)
        level = grown
    return _best_first(share, text, match)


def _best_first(
    share: dict[tuple[int, ...], float], text: list[int], match: list[int]
) -> list[tuple[int, ...]]:
    taken: list[tuple[int, ...]] = []
    arrived: dict[tuple[int, ...], int] = {path: 0 for path in share if len(path) == 1}

    def order_of(path: tuple[int, ...]) -> tuple[float, int, int]:
        part = match + list(path[:-1])
        first = [text[e] for e in range(len(part), len(text)) if text[e - len(part) : e] == part]
        return -share[path], arrived[path], list(dict.fromkeys(first)).index(path[-1])

    while arrived and len(taken) < 8:
        path = min(arrived, key=order_of)
        del arrived[path]
        taken.append(path)
        for other in share:
            if other[:-1] == path:
                arrived[other] = len(taken)
    return taken


@oracle_test("token-recycling")
def token_recycling() -> Iterator[Check]:
    """The 80 published nodes; the matrix has each token's last top-8 successors."""
    levels = Counter(map(len, PUBLISHED))
    yield Check(
        "the published tree has 8, 21, 25, 15, 8 and 3 nodes on its levels",
        [levels[depth] for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3],
    )
    logits = wordy()
    total = 0
    # Expected tokens per cost at 0.1 a row: 1.37 / 1.1, 1.507 / 1.2, 1.597 / 1.3, so two nodes pay.
    for tree, paths in (("published", PUBLISHED), ("worthwhile", [(0,), (0, 0)])):
        with scripted(logits) as llm:
            trace: list[TracedRound] = []
            for prompt in PROMPTS:
                trace += rounds(llm, f"token-recycling:tree={tree}", prompt)
        matrix: dict[int, list[int]] = {}
        wrong = 0
        for one in trace:
            expected = {tuple(_follow(matrix, one.text[-1], path)) for path in paths} - {()}
            wrong += set(one.paths) != expected
            for path in [(), *one.paths]:
                row = logits((*one.text, *path))
                last = (*one.text, *path)[-1]
                matrix[last] = np.argsort(-row, kind="stable")[:8].tolist()
        total += accepted(trace)
        yield Check(f"the {tree} tree equals the oracle", wrong == 0, f"{len(trace)} rounds")
    yield Check("drafts are accepted", total > 0, f"{total}")


def _follow(matrix: dict[int, list[int]], token: int, ranks: tuple[int, ...]) -> list[int]:
    path: list[int] = []
    for rank in ranks:
        if token not in matrix:
            return []
        token = matrix[token][rank]
        path.append(token)
    return path


@oracle_test("stand")
def stand() -> Iterator[Check]:
    """Running averages over ten tokens, longest n-gram first, Gumbel samples without replacement
    for the whole published tree."""
    table = NgramProbabilities(width=2)
    table.update((1,), [5, 6], [0.6, 0.4])
    table.update((1,), [6, 7], [0.8, 0.2])
    yield Check(
        "averages by hand",
        {k: round(v, 9) for k, v in table.rows[(1,)][1].items()} == {6: 0.6, 5: 0.3},
    )
    logits = wordy(spread=1.6, echo=3)  # so that the n-gram length matters
    for temperature in (0.0, 0.8):
        with scripted(logits) as llm:
            trace = [
                one
                for prompt in PROMPTS
                for one in rounds(llm, "stand:row_cost=0", prompt, temperature=temperature)
            ]
        wrong = _stand_mistakes(trace, logits, temperature)
        yield Check(f"T={temperature} equals the oracle", wrong == 0, f"{len(trace)} rounds")
        yield Check(f"drafts are accepted at T={temperature}", accepted(trace) > 0)


def _stand_mistakes(trace: list[TracedRound], logits: Logits, temperature: float) -> int:
    averages: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}
    noise = Noise(5)
    wrong = 0

    def drawn(text: list[int]) -> list[int]:
        row = next((averages[k][1] for n in (3, 2, 1) if (k := tuple(text[-n:])) in averages), None)
        if row is None:
            return []
        ids = np.flatnonzero(row)
        keys = np.log(row[ids])
        if temperature:
            keys = keys + noise.gumbel(ids, len(text))
        order: list[int] = ids[np.argsort(-keys)].tolist()
        return order

    for one in trace:
        tree: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        samples: dict[tuple[int, ...], list[int]] = {}
        for ranks in sorted(PUBLISHED, key=lambda ranks: (len(ranks), ranks)):
            above = tree.get(ranks[:-1])
            if above is None:
                continue
            if above not in samples:
                samples[above] = drawn([*one.text, *above])
            if ranks[-1] < len(samples[above]):
                tree[ranks] = (*above, samples[above][ranks[-1]])
        wrong += one.paths != list(tree.values())[1:]
        for path in [(), *one.paths]:
            _learn(averages, [*one.text, *path], logits, temperature)
    return wrong


def _learn(
    averages: dict[tuple[int, ...], tuple[int, np.ndarray]],
    text: list[int],
    logits: Logits,
    temperature: float,
) -> None:
    row = logits(tuple(text)).astype(float)
    top = np.argsort(-row)[:10]
    fresh = np.zeros_like(row)
    fresh[top] = np.exp((row[top] - row.max()) / (temperature or 1))
    fresh /= fresh.sum()
    for n in (1, 2, 3):
        if len(text) >= n:
            count, average = averages.get(tuple(text[-n:]), (0, np.zeros_like(row)))
            average = (count * average + fresh) / (count + 1)
            average[np.argsort(-average)[10:]] = 0
            averages[tuple(text[-n:])] = (count + 1, average)

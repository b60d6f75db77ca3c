"""Oracle test of suffix (SuffixDecoding, arXiv:2411.04975): substring counts, and the most probable
continuations of the longest repeated suffix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.rounds import accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.suffix import SuffixAutomaton


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
            for bound in (0.1, 0.5):
                trace = rounds(llm, f"suffix:memory=0,min_probability={bound}", prompt)
                total += accepted(trace)
                wrong = [o for o in trace if sorted(o.paths) != sorted(_likeliest(o.text, bound))]
                yield Check(f"{prompt!r} drafts continuations of {bound} and more", not wrong)
    yield Check("drafts are accepted", total > 0, f"{total}")
    with scripted(wordy()) as llm:
        cold = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        warm = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("earlier outputs are remembered", warm.stats.passes < cold.stats.passes)
        llm.clear()
        again = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("`clear` forgets them", again.stats.passes == cold.stats.passes)


def _likeliest(text: list[int], bound: float) -> list[tuple[int, ...]]:
    """Up to 8 continuations of the longest repeated suffix with probability of at least `bound`,
    at most twice as long as the suffix, most probable first (found by search)."""

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
                if value >= bound:
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

"""Oracle test of suffix (SuffixDecoding, arXiv:2411.04975): substring counts, and the tree with the
largest total probability after any suffix of the text that occurred before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.rounds import TracedRound, rounds, scripted, wordy
from anydecode.decoders.speculative.suffix import SuffixAutomaton, SuffixDrafter

Texts = list[list[int]]


@oracle_test("suffix")
def suffix() -> Iterator[Check]:
    """The automaton counts every substring; a draft is the most probable tree of all matches."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 3, 60).tolist()
    automaton, agree = SuffixAutomaton(), True
    for token in text:
        automaton.append(token)
    for length in range(1, 8):
        for start in range(len(text) - length + 1):
            state, part = 0, text[start : start + length]
            for token in part:
                state = automaton.next[state][token]
            count = sum(text[s : s + length] == part for s in range(len(text) - length + 1))
            agree &= automaton.counts[state] == count
    yield Check("substring counts equal a search", agree)
    num_accepted, num_short = 0, 0
    for key, bound, factor in (
        ("suffix", 0.1, 2.0),
        ("suffix:min_probability=0.5,factor=1.0", 0.5, 1.0),
    ):
        with scripted(wordy()) as llm:
            earlier: Texts = []
            wrong = 0
            for prompt in (*PROMPTS, *PROMPTS):
                trace = rounds(llm, key, prompt, temperature=0.6)
                for one in trace:
                    follows = _follows_longest(one, earlier, bound, factor)
                    wrong += follows is None
                    num_short += follows is False
                    num_accepted += len(one.accepted)
                earlier.append([*trace[-1].text, *trace[-1].generated][len(prompt) :][:48])
            name = f"drafts of {bound} and more are the tree with the largest total"
            yield Check(name, not wrong, f"{wrong} differ")
    yield Check("drafts are accepted", num_accepted > 0, f"{num_accepted}")
    yield Check("shorter matches draft too", num_short > 0, f"{num_short} rounds")
    with scripted(wordy()) as llm:
        cold = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        warm = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("earlier outputs are remembered", warm.stats.passes < cold.stats.passes)
        llm.clear()
        again = llm.generate("hello", decoder="suffix", max_tokens=40, ignore_eos=True)
        yield Check("`clear` forgets them", again.stats.passes == cold.stats.passes)
    yield from _memory()


def _memory() -> Iterator[Check]:
    """Earlier answers are forgotten piece by piece, the oldest first."""
    drafter = SuffixDrafter(memory=400_000)
    is_within = True
    num_kept: list[int] = []
    for number in range(60):
        drafter.learn([1000 * number + token for token in range(50)])
        is_within &= drafter.num_bytes <= drafter.memory
        firsts = [1000 * earlier for earlier in range(number + 1)]
        kept = [any(first in part.next[0] for part in drafter.parts) for first in firsts]
        is_within &= kept == sorted(kept)
        num_kept.append(sum(kept))
    full = num_kept[num_kept.index(max(num_kept)) :]
    yield Check("`memory` bounds the bytes, and the oldest answers go first", is_within)
    yield Check(
        "most answers stay when memory is full",
        len(full) > 10 and min(full) >= 0.7 * max(full),
        f"{min(full)} to {max(full)} answers",
    )


def _follows_longest(one: TracedRound, earlier: Texts, bound: float, factor: float) -> bool | None:
    """Whether the drafted tree follows the longest match of its source; None if it is not one with
    the largest total."""
    trees = [
        (number == 0, total, shares)
        for source in ([one.text], earlier)
        for number, (total, shares) in enumerate(_trees(source, one.text, one.paths, bound, factor))
    ]
    largest = max((total for _, total, _ in trees), default=0.0)
    found = [
        first
        for first, total, shares in trees
        if total > largest - 1e-9
        and abs(sum(shares) - total) < 1e-9
        and min(shares, default=bound) >= bound
    ]
    if not trees:
        return None if one.paths else True
    return any(found) if found else None


def _trees(
    source: Texts, text: list[int], drafted: list[tuple[int, ...]], bound: float, factor: float
) -> Iterator[tuple[float, list[float]]]:
    """For every suffix of `text` that occurs in `source` (in the text itself: before its end), the
    longest first: the largest total probability of a tree after it, and the probabilities of the
    nodes of `drafted` there, with further ones of 1 where these are too many. From the counts of
    all substrings."""

    counts = Counter(
        tuple(other[start:end])
        for other in source
        for start in range(len(other))
        for end in range(start + 1, len(other) + 1)
    )
    vocabulary = sorted({token for other in source for token in other})
    for length in range(len(text), 0, -1):
        match = tuple(text[-length:])
        if counts[match] <= (source == [text]):
            continue
        size = min(8, int(factor * length))
        open_nodes: dict[tuple[int, ...], float] = {(): 1.0}
        taken: dict[tuple[int, ...], float] = {}
        while open_nodes and len(taken) < size + 1:
            path = max(open_nodes, key=lambda path: open_nodes[path])
            weight = taken[path] = open_nodes.pop(path)
            part = (*match, *path)
            for token in vocabulary:
                longer = (*part, token)
                value = weight * counts[longer] / counts[part]
                if value >= bound:
                    open_nodes[longer[len(match) :]] = value
        del taken[()]
        starts = [(*match, *path) for path in drafted]
        shares = [counts[start] / counts[match] for start in starts]
        yield sum(taken.values()), shares + [1.0] * max(0, len(drafted) - size)

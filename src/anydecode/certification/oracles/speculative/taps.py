"""Oracle test of TAPS: the drafts of both drafters replayed from the text and the target's rows,
and their composition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import latest_copy
from anydecode.certification.rounds import TracedRound, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
SIZE = 8
COPY, RECYCLE = "prompt-lookup", "token-recycling"
#: Rank paths that token recycling drafts by default: its published tree cut to those that pay.
RANKS = ((0,), (0, 0))

Path = tuple[int, ...]


@oracle_test("taps")
def taps() -> Iterator[Check]:
    """By default the drafters' trees are merged, a node of each in turn, up to eight nodes, the
    more accepted drafter first; with `route`, only that drafter's tree is verified."""
    for decoder, route in (("taps", False), ("taps:route=true", True)):
        for temperature in (0.0, 0.8):
            wrong = num_mixed = num_accepted = 0
            firsts: set[str] = set()
            for prompt in PROMPTS:
                with scripted(wordy()) as llm:
                    trace = rounds(llm, decoder, prompt, 60, temperature=temperature)
                for one, expected in zip(trace, _replay(trace, route), strict=True):
                    sources = list(expected.values())
                    wrong += one.paths != list(expected) or (one.entry["sources"] or []) != sources
                    num_mixed += len(set(sources)) == 2
                    firsts |= set(sources[:1])
                    num_accepted += len(one.accepted)
            where = f"route={route}, T={temperature}"
            yield Check(f"trees and their sources equal the oracle's, {where}", wrong == 0)
            yield Check(f"drafts are accepted, {where}", num_accepted > 0, f"{num_accepted}")
            yield Check(f"both drafters come first, {where}", firsts == {COPY, RECYCLE})
            if not route:
                yield Check(f"trees are mixed, {where}", num_mixed > 0, f"{num_mixed}")


def _replay(trace: list[TracedRound], route: bool) -> Iterator[dict[Path, str]]:
    """The paths of each round's tree in order, with the drafter that each came from."""
    logits = wordy()
    successors: dict[int, list[int]] = {}
    hits: dict[str, list[bool]] = {COPY: [], RECYCLE: []}
    for one in trace:
        copy = latest_copy(one.text, SIZE)
        drafts = {
            COPY: [tuple(copy[: n + 1]) for n in range(len(copy))],
            RECYCLE: list(_recycled(successors, one.text[-1])),
        }
        ranked = sorted((key for key in hits if drafts[key]), key=lambda key: -_rate(hits[key]))
        yield _merged({key: drafts[key] for key in ranked[: 1 if route else None]})
        for key, paths in drafts.items():
            if paths:
                hits[key].append((one.generated[0],) in paths)
        for path in [(), *one.paths]:
            seen = (*one.text, *path)
            successors[seen[-1]] = np.argsort(-logits(seen), kind="stable")[:8].tolist()


def _rate(hits: list[bool]) -> float:
    """The rate of right first drafts, a round counting 0.9 times as much as the next; before the
    first there is one success in two."""
    weights = [0.9**age for age in range(len(hits), -1, -1)]
    right = sum(weight * hit for weight, hit in zip(weights[1:], hits, strict=True))
    return (weights[0] + right) / (2 * weights[0] + sum(weights[1:]))


def _recycled(successors: dict[int, list[int]], last: int) -> Iterator[Path]:
    for ranks in RANKS:
        path: Path = ()
        for rank in ranks:
            following = successors.get((path or (last,))[-1])
            if following is None:
                break
            path = (*path, following[rank])
        else:
            yield path


def _merged(drafts: dict[str, list[Path]]) -> dict[Path, str]:
    tree: dict[Path, str] = {}
    for number in range(max(map(len, drafts.values()), default=0)):
        for key, paths in drafts.items():
            is_new = number < len(paths) and paths[number] not in tree
            if is_new and len(tree) < SIZE and paths[number][:-1] in {(), *tree}:
                tree[paths[number]] = key
    return tree

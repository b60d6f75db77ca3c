"""Oracle test of TAPS: the drafts of STAND are replayed from the text and the target's rows, those
of suffix are asked of its own drafter, the trees of draft models follow from their rows, and the
composition of all is done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.eagle import Cache, Drafting
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.oracles.speculative.stand import StandReplay
from anydecode.certification.oracles.speculative.state_drafters import TargetStates, shares
from anydecode.certification.oracles.speculative.worthwhile_trees import WorthwhileRanks, seconds
from anydecode.certification.rounds import (
    Logits,
    TracedRound,
    accepted,
    blurred,
    rounds,
    scripted,
    wordy,
)
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint, with_drafter
from anydecode.decoders.speculative.suffix import SuffixDrafter
from anydecode.decoders.speculative.token_recycling import PUBLISHED
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
SIZE = 8
#: Levels of an EAGLE tree, and nodes that each expands.
DEPTH = WIDTH = 4
LOGITS = wordy(spread=1.6, echo=3)
#: Draft models that are right in other places: each is sure of itself behind its own letters.
DRAFTS = tuple(blurred(LOGITS, seed, error=1.0) for seed in (9, 10))
#: Drafters of two kinds that read other states of the target.
READERS: tuple[Callable[[Network], Checkpoint], ...] = (
    eagle_checkpoint,
    partial(eagle3_checkpoint, seed=3),
)

Path = tuple[int, ...]
#: A tree's paths in order, and its confidence.
Drafted = tuple[list[Path], float | None]


@oracle_test("taps")
def taps() -> Iterator[Check]:
    """By default the drafters' trees are merged, a node of each in turn, up to eight nodes, that
    with the larger mean top probability in this round first; with `route`, it alone is verified.
    Every draft model has a tree. Samples under the rejection rule follow the target."""
    for drafts in ((), DRAFTS):
        for route in (False, True):
            for temperature in (0.0, 0.8):
                yield from _scripted_checks(drafts, route, temperature)
    for route in (False, True):
        for temperature in (0.0, 0.8):
            yield from _reader_checks(route, temperature)
    yield from rejection_checks("taps", prompt=REPEATING)


def _scripted_checks(
    drafts: tuple[Logits, ...], route: bool, temperature: float
) -> Iterator[Check]:
    """The default composition, with draft models that read tokens alone."""
    wrong = num_mixed = num_accepted = 0
    firsts: set[str] = set()
    for prompt in PROMPTS:
        with scripted(LOGITS, drafts) as llm:
            llm.cost_model = FixedCosts(seconds)
            decoder = "taps:route=true" if route else "taps"
            trace = rounds(llm, decoder, prompt, 60, temperature=temperature)
        expected = _replay(trace, len(prompt), drafts, route, temperature)
        for one, tree in zip(trace, expected, strict=True):
            sources = list(tree.values())
            wrong += one.paths != list(tree) or (one.entry["sources"] or []) != sources
            num_mixed += len(set(sources)) > 1
            firsts |= set(sources[:1])
        num_accepted += accepted(trace)
    where = f"{len(drafts)} draft models, route={route}, T={temperature}"
    names = {"suffix", "stand", *(_name(number) for number in range(len(drafts)))}
    yield Check(f"trees and their sources equal the oracle's, {where}", wrong == 0)
    yield Check(f"drafts are accepted, {where}", num_accepted > 0, f"{num_accepted}")
    seen = names <= firsts if not drafts else len(firsts & names) > 1
    yield Check(f"the first drafter changes, {where}", seen, ", ".join(sorted(firsts)))
    if not route:
        yield Check(f"trees are mixed, {where}", num_mixed > 0, f"{num_mixed}")


def _name(number: int) -> str:
    return f"eagle on draft-{number + 1}" if number else "eagle on draft"


def _replay(
    trace: list[TracedRound],
    num_prompt: int,
    drafts: tuple[Logits, ...],
    route: bool,
    temperature: float,
) -> Iterator[dict[Path, str]]:
    """The paths of each round's tree in order, with the drafter that each came from."""
    stand = StandReplay(LOGITS, temperature, WorthwhileRanks(PUBLISHED))
    request: Any = SimpleNamespace(prompt=trace[0].text[:num_prompt], tokens=[], prediction=None)
    session: Any = SuffixDrafter().open(request)
    for one in trace:
        request.tokens = one.text[num_prompt:]
        found: dict[str, Drafted] = {}
        for number, logits in enumerate(drafts):
            rows = partial(_scripted_row, logits, one.text)
            found[_name(number)] = _grown(rows, len(one.text), temperature)
        copied = session.draft(SIZE)
        paths = [tuple(copied.tokens[at] for at in copied.path(n)) for n in range(len(copied))]
        found["suffix"] = paths, copied.confidence
        found["stand"] = stand.tree(one.text, SIZE), stand.confidence
        yield _composed(found, route)
        stand.learn(one)


def _scripted_row(logits: Logits, text: list[int], path: Path) -> np.ndarray:
    return logits((*text, *path))


def _reader_checks(route: bool, temperature: float) -> Iterator[Check]:
    """Two drafters that read their target's states, of other layers each."""
    key = "taps:drafters=eagle,route=true" if route else "taps:drafters=eagle"
    with with_drafter(*READERS, cache_positions=1024, prefix_cache=False) as llm:
        trace = rounds(llm, key, "the cat sat on the cat", 24, temperature=temperature)
        target: Network = llm.model.network  # type: ignore[attr-defined]
    wrong, others = 0, [one for one in trace if one.tokens]
    for one in others:
        found: dict[str, Drafted] = {}
        for number, reader in enumerate(READERS):
            rows = _rows(Drafting(reader(target), target), one.text)
            found[_name(number)] = _grown(rows, len(one.text), temperature)
        tree = _composed(found, route)
        wrong += one.paths != list(tree) or one.entry["sources"] != list(tree.values())
    where = f"drafters that read states, route={route}, T={temperature}"
    yield Check(
        f"trees and their sources equal the oracle's, {where}",
        not wrong and len(others) > 5,
        f"{wrong} of {len(others)} differ",
    )
    used = {source for one in others for source in one.entry["sources"]}
    yield Check(f"both drafters are used, {where}", len(used) == 2, ", ".join(sorted(used)))
    yield Check(f"drafts are accepted, {where}", accepted(trace) > 3, str(accepted(trace)))


def _rows(drafting: Drafting, text: list[int]) -> Callable[[Path], np.ndarray]:
    """The logits of a drafter that reads states, after paths behind `text`."""
    target = TargetStates(drafting.target)
    found: dict[Path, tuple[np.ndarray, np.ndarray, Cache]] = {}
    cache, before = Cache(), np.empty(0)
    for position, token in enumerate(text):
        if position:
            found[()] = (*drafting.row(cache, token, before, position), cache)
        if position < len(text) - 1:
            states = target.states(token)
            before = drafting.target_state(states, target.normed(states[-1]))

    def row(path: Path) -> np.ndarray:
        if path not in found:
            row(path[:-1])
            _, state, parents = found[path[:-1]]
            branch = parents.copy()
            position = len(text) + len(path) - 1
            found[path] = (*drafting.row(branch, path[-1], state, position), branch)
        return found[path][0]

    return row


def _grown(rows: Callable[[Path], np.ndarray], length: int, temperature: float) -> Drafted:
    """EAGLE-2's tree: of each level the best nodes are expanded, and the best of all kept."""
    weights: dict[Path, float] = {}
    tops: dict[Path, float] = {}
    level: list[Path] = [()]
    for _ in range(DEPTH):
        children: dict[Path, float] = {}
        for path in level:
            row = rows(path)
            scores = np.sort(row / (temperature or 1.0))[-64:]
            tops[path] = 1 / float(np.exp(scores - scores[-1]).sum())
            for token, share in shares(row, temperature, length + len(path))[:WIDTH]:
                child = (*path, token)
                children[child] = weights.get(path, 1.0) * share
        weights |= children
        best = sorted(children, key=lambda path: -children[path])[:WIDTH]
        level = [path for path in children if path in best]
    kept = sorted(weights, key=lambda path: -weights[path])[:SIZE]
    parents = {path[:-1] for path in kept}
    confidence = sum(tops[path] for path in parents) / len(parents)
    return [path for path in weights if path in kept], confidence


def _composed(found: dict[str, Drafted], route: bool) -> dict[Path, str]:
    """The trees, by descending confidence, merged into one of up to `SIZE` nodes."""
    drafting = [key for key in found if found[key][0]]
    ranked = sorted(drafting, key=lambda key: -(found[key][1] or 0.0))
    drafts = {key: found[key][0] for key in ranked[: 1 if route else None]}
    tree: dict[Path, str] = {}
    for number in range(max(map(len, drafts.values()), default=0)):
        for key, paths in drafts.items():
            is_new = number < len(paths) and paths[number] not in tree
            if is_new and len(tree) < SIZE and paths[number][:-1] in {(), *tree}:
                tree[paths[number]] = key
    return tree

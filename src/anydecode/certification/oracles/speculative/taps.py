"""Oracle test of TAPS: the drafts of STAND are replayed from the text and the target's rows, those
of suffix are asked of its own drafter, and their composition is done again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.paying_trees import PayingRanks, seconds
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.oracles.speculative.stand import StandReplay
from anydecode.certification.rounds import TracedRound, rounds, scripted, wordy
from anydecode.decoders.speculative.suffix import SuffixDrafter
from anydecode.decoders.speculative.token_recycling import PUBLISHED

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
SIZE = 8
LOGITS = wordy(spread=1.6, echo=3)

Path = tuple[int, ...]


@oracle_test("taps")
def taps() -> Iterator[Check]:
    """By default the drafters' trees are merged, a node of each in turn, up to eight nodes, that
    with the larger mean top probability in this round first; with `route`, it alone is verified.
    Samples under the rejection rule follow the target."""
    for decoder, route in (("taps", False), ("taps:route=true", True)):
        for temperature in (0.0, 0.8):
            wrong = num_mixed = num_accepted = 0
            firsts: set[str] = set()
            for prompt in PROMPTS:
                with scripted(LOGITS) as llm:
                    llm.cost_model = FixedCosts(seconds)
                    trace = rounds(llm, decoder, prompt, 60, temperature=temperature)
                for one, expected in zip(
                    trace, _replay(trace, len(prompt), route, temperature), strict=True
                ):
                    sources = list(expected.values())
                    wrong += one.paths != list(expected) or (one.entry["sources"] or []) != sources
                    num_mixed += len(set(sources)) == 2
                    firsts |= set(sources[:1])
                    num_accepted += len(one.accepted)
            where = f"route={route}, T={temperature}"
            yield Check(f"trees and their sources equal the oracle's, {where}", wrong == 0)
            yield Check(f"drafts are accepted, {where}", num_accepted > 0, f"{num_accepted}")
            yield Check(f"both drafters come first, {where}", firsts == {"suffix", "stand"})
            if not route:
                yield Check(f"trees are mixed, {where}", num_mixed > 0, f"{num_mixed}")
    yield from rejection_checks("taps", prompt=REPEATING)


def _replay(
    trace: list[TracedRound], num_prompt: int, route: bool, temperature: float
) -> Iterator[dict[Path, str]]:
    """The paths of each round's tree in order, with the drafter that each came from."""
    stand = StandReplay(LOGITS, temperature, PayingRanks(PUBLISHED))
    request: Any = SimpleNamespace(prompt=trace[0].text[:num_prompt], tokens=[], prediction=None)
    session: Any = SuffixDrafter().open(request)
    for one in trace:
        request.tokens = one.text[num_prompt:]
        copied = session.draft(SIZE)
        drafts = {
            "suffix": [
                tuple(copied.tokens[at] for at in copied.path(n)) for n in range(len(copied))
            ],
            "stand": stand.tree(one.text, SIZE),
        }
        confidences = {"suffix": copied.confidence, "stand": stand.confidence}
        ranked = sorted((key for key in drafts if drafts[key]), key=lambda key: -confidences[key])
        yield _merged({key: drafts[key] for key in ranked[: 1 if route else None]})
        stand.learn(one)


def _merged(drafts: dict[str, list[Path]]) -> dict[Path, str]:
    tree: dict[Path, str] = {}
    for number in range(max(map(len, drafts.values()), default=0)):
        for key, paths in drafts.items():
            is_new = number < len(paths) and paths[number] not in tree
            if is_new and len(tree) < SIZE and paths[number][:-1] in {(), *tree}:
                tree[paths[number]] = key
    return tree

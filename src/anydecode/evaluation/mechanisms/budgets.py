"""How much is drafted, and what overlaps: chains that stop, goodput, bandits, PEARL, Saguaro."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from random import Random

import numpy as np

from anydecode.decoders.speculative.goodput import (
    DraftCosts,
    GoodputBudget,
    LinearCost,
    RunningSet,
    expected_tokens,
)
from anydecode.decoders.speculative.saguaro import fan_out
from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.mechanisms.speculative import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
    overlap,
)
from anydecode.evaluation.mechanisms.trees import DRAFT as SHARP
from anydecode.evaluation.mechanisms.trees import draft_row
from anydecode.evaluation.rounds import Drafted, accepted, picked, rounds, scripted, wordy
from anydecode.scoring.sequence import Sequence


@mechanism("specdec++")
def specdec() -> Iterator[Check]:
    """A chain ends with the first draft that makes 1 - product > bound, and that draft stays."""
    lengths = set()
    for temperature in (0.0, 0.8):
        wrong, kept = 0, 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                found = rounds(
                    llm, "specdec++:bound=0.6,fewest=2,size=6", prompt, temperature=temperature
                )
                for one in found:
                    full = chain_oracle(one.text, 6, temperature)
                    product, length = 1.0, 0
                    while length < 6:
                        row = DRAFT((*one.text, *full[:length])).astype(float) / (temperature or 1)
                        q = np.exp(row - row.max())
                        product *= q[full[length]] / q.sum()
                        length += 1
                        if length >= 2 and 1 - product > 0.6:
                            break
                    wrong += one.tokens != full[:length]
                    lengths.add(length)
                kept += accepted(found)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", kept > 0, f"{kept}")
    yield Check("chains of different length occur", len(lengths) > 2, f"{sorted(lengths)}")


@mechanism("smartspec")
def smartspec() -> Iterator[Check]:
    """The length of best goodput, worked by hand; shorter under load; none where it never pays."""
    yield Check(
        "expected tokens equal the sum over outcomes",
        isclose(expected_tokens(0.7, 3), 1 + 0.7 + 0.7**2 + 0.7**3)
        and expected_tokens(1.0, 3) == 4,
    )
    yield Check(
        "half right, cheap rows", _chosen(0.5, 1, LinearCost(1.0, 0.1)) == _best(0.5, 1, 0.1)
    )
    sizes = [_chosen(0.8, count, LinearCost(1.0, 0.05)) for count in (1, 2, 4, 8, 16, 64)]
    expected = [_best(0.8, count, 0.05) for count in (1, 2, 4, 8, 16, 64)]
    yield Check("every load equals the formula", sizes == expected, f"{sizes}")
    yield Check(
        "drafts shorten as load grows",
        sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1],
    )
    yield Check(
        "nothing is drafted where rows cost a pass", _chosen(0.4, 1, LinearCost(0.0, 1.0)) == 0
    )
    with scripted(wordy()) as llm:
        found = rounds(llm, "smartspec:fixed=1,per_row=0.02", "abcabcabd", 60)
    yield Check("drafts are accepted", accepted(found) > 0, f"{accepted(found)}")
    idle = RunningSet(DraftCosts(LinearCost(0.0, 1.0)))
    with scripted(wordy()) as llm:
        never = rounds(llm, "smartspec:fixed=0,per_row=1", "abcabcabd", 30)
    yield Check("no draft, no change of the rate", not any(one.tokens for one in never))
    yield Check("which begins as the others'", GoodputBudget(idle, 4).rate == idle.rate)


def _chosen(rate: float, count: int, cost: LinearCost) -> int:
    load = RunningSet(DraftCosts(cost), rate)
    for _ in range(count):
        load.running[_sequence()] = GoodputBudget(load, 8, margin=0.0)
    sequence, budget = next(iter(load.running.items()))
    return budget.size(sequence)


def _sequence() -> Sequence:
    return Sequence([1], None, None, None, lambda runner, tokens: None)  # type: ignore[arg-type,return-value]


def _best(rate: float, count: int, per_row: float) -> int:
    worth = [
        count * sum(rate**i for i in range(k + 1)) / (1 + per_row * count * (k + 1))
        for k in range(9)
    ]
    return max(range(9), key=lambda k: worth[k])


@mechanism("bandit")
def bandit() -> Iterator[Check]:
    """Draws from the posterior of the acceptance rate, replayed from the rounds."""
    with scripted(wordy()) as llm:
        found = rounds(llm, "bandit:drafter=copyspec,memory=1,fixed=1,per_row=0.1", "abcabcabd", 80)
    random = Random("5/0")
    right = wrong = 0.0
    mistakes, sizes = 0, []
    for one in found:
        rate = random.betavariate(right + 1, wrong + 1)
        worth = [sum(rate**i for i in range(k + 1)) / (1 + 0.1 * (k + 1)) for k in range(9)]
        size = int(np.argmax(worth))
        text = one.text
        positions = [s for s in range(len(text) - 3) if text[s : s + 3] == text[-3:]]
        expected = text[positions[0] + 3 : positions[0] + 3 + size] if positions else []
        mistakes += one.tokens != expected
        sizes.append(size)
        if one.tokens:
            right += len(one.accepted)
            wrong += len(one.accepted) < len(one.tokens)
    yield Check("lengths equal the replay", mistakes == 0, f"{sizes}")
    yield Check("it tries several lengths", len(set(sizes)) > 2)
    yield Check("drafts are accepted", accepted(found) > 0)
    late = sizes[len(sizes) // 2 :]
    yield Check("it has learned that drafts are good here", np.mean(late) > np.mean(sizes[:5]))


@mechanism("pearl")
def pearl() -> Iterator[Check]:
    """Pre-verify while nothing is pending, post-verify while everything was right; they overlap."""
    modes = set()
    for temperature in (0.0, 0.8):
        wrong = 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                pending: list[int] = []
                for one in rounds(llm, "pearl:size=4", prompt, temperature=temperature):
                    wrong += one.tokens != pending
                    modes.add(bool(pending))
                    ahead = chain_oracle([*one.text, *pending], 4, temperature)
                    whole = one.said == [*pending, ahead[0]]
                    pending = ahead[1:] if whole else []
        yield Check(f"T={temperature} equals the two-mode oracle", wrong == 0)
    yield Check("both modes occur", modes == {True, False})
    yield from overlap("pearl:size=4")


@mechanism("saguaro")
def saguaro() -> Iterator[Check]:
    """Fan-out by the formula; prepared outcomes and drafts equal an oracle; hits save time."""
    yield Check("uniform shares", fan_out(3, 8, 0.999999, 0.5)[:3] == [1, 1, 1])
    shares = [0.8 ** (k / 1.5) for k in range(4)]
    shares[3] *= 0.2 ** (-1 / 1.5)
    by_hand = [round(20 * share / sum(shares)) for share in shares]
    yield Check(
        "fan-out of 20 over three drafts", fan_out(3, 20, 0.8, 0.5) == by_hand, f"{by_hand}"
    )
    for temperature in (0.0, 0.8):
        wrong = hits = misses = 0
        with scripted(wordy(spread=1.8), SHARP) as llm:
            for prompt in PROMPTS:
                found = rounds(llm, "saguaro:size=3,fan=2", prompt, temperature=temperature)
                for one, following in zip(found, found[1:], strict=False):
                    expected = _outcomes(one.text, one.tokens, temperature)
                    wrong += set(map(tuple, one.facts["prepared"])) != expected
                    outcome = (len(one.accepted), one.said[-1])
                    hits += following.facts["hit"]
                    misses += not following.facts["hit"]
                    wrong += following.facts["hit"] != (outcome in expected)
                    wrong += following.tokens != _chain(following, temperature)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(
            f"T={temperature}: hits and misses occur", hits > 0 < misses, f"{hits}, {misses}"
        )
    yield from overlap("saguaro:size=4,fan=3")


def _outcomes(text: list[int], drafts: list[int], temperature: float) -> set[tuple[int, int]]:
    found = set()
    for kept in range(len(drafts) + 1):
        excluded = drafts[kept] if kept < len(drafts) else None
        tokens = list(draft_row(text, tuple(drafts[:kept]), temperature))
        found |= {(kept, token) for token in [t for t in tokens if t != excluded][:2]}
    return found


def _chain(one: Drafted, temperature: float) -> list[int]:
    """Drafts prepared in time come from the 64 likeliest tokens, those made at once from all."""
    path: tuple[int, ...] = ()
    for _ in range(3):
        if one.facts["hit"]:
            path = (*path, next(iter(draft_row(one.text, path, temperature))))
        else:
            seen = (*one.text, *path)
            path = (*path, picked(SHARP(seen), len(seen), temperature))
    return list(path)

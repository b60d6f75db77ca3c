"""Oracle tests of draft lengths and of overlapped drafting: chains that stop, goodput, bandits,
PEARL, Saguaro."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from random import Random

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
    overlap,
)
from anydecode.certification.oracles.trees import DRAFT as SHARP
from anydecode.certification.oracles.trees import draft_row
from anydecode.certification.rounds import (
    TracedRound,
    accepted,
    plain_token,
    rounds,
    scripted,
    wordy,
)
from anydecode.decoders.speculative.goodput import (
    DraftCosts,
    GoodputBudget,
    LinearCost,
    RunningSet,
    expected_tokens,
)
from anydecode.decoders.speculative.saguaro import fan_out
from anydecode.scoring.sequence import Sequence


@oracle_test("specdec++")
def specdec() -> Iterator[Check]:
    """A chain ends with the first draft for which 1 - product > bound; that draft is kept."""
    lengths = set()
    for temperature in (0.0, 0.8):
        wrong, num_accepted = 0, 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                trace = rounds(
                    llm, "specdec++:bound=0.6,min_drafts=2,size=6", prompt, temperature=temperature
                )
                for one in trace:
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
                num_accepted += accepted(trace)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", num_accepted > 0, f"{num_accepted}")
    yield Check("chains of different lengths occur", len(lengths) > 2, f"{sorted(lengths)}")


@oracle_test("smartspec")
def smartspec() -> Iterator[Check]:
    """The length of maximum goodput, computed by hand; shorter under load; 0 where drafting never
    pays."""
    yield Check(
        "expected tokens equal the sum over outcomes",
        isclose(expected_tokens(0.7, 3), 1 + 0.7 + 0.7**2 + 0.7**3)
        and expected_tokens(1.0, 3) == 4,
    )
    yield Check(
        "acceptance rate 0.5, cheap rows",
        _chosen(0.5, 1, LinearCost(1.0, 0.1)) == _best(0.5, 1, 0.1),
    )
    sizes = [_chosen(0.8, count, LinearCost(1.0, 0.05)) for count in (1, 2, 4, 8, 16, 64)]
    expected = [_best(0.8, count, 0.05) for count in (1, 2, 4, 8, 16, 64)]
    yield Check("every load equals the formula", sizes == expected, f"{sizes}")
    yield Check(
        "drafts get shorter as load grows",
        sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1],
    )
    yield Check(
        "nothing is drafted where every row costs a pass",
        _chosen(0.4, 1, LinearCost(0.0, 1.0)) == 0,
    )
    with scripted(wordy()) as llm:
        trace = rounds(llm, "smartspec:fixed=1,per_row=0.02", "abcabcabd", 60)
    yield Check("drafts are accepted", accepted(trace) > 0, f"{accepted(trace)}")
    idle = RunningSet(DraftCosts(LinearCost(0.0, 1.0)))
    with scripted(wordy()) as llm:
        never = rounds(llm, "smartspec:fixed=0,per_row=1", "abcabcabd", 30)
    yield Check("nothing is drafted where rows are expensive", not any(one.tokens for one in never))
    yield Check(
        "without drafts the rate stays the initial one", GoodputBudget(idle, 4).rate == idle.rate
    )


def _chosen(rate: float, count: int, cost: LinearCost) -> int:
    load = RunningSet(DraftCosts(cost), rate)
    for _ in range(count):
        load.running[_sequence()] = GoodputBudget(load, 8, margin=0.0)
    sequence, budget = next(iter(load.running.items()))
    return budget.size(sequence)


def _sequence() -> Sequence:
    return Sequence([1], None, None, None, lambda runner, tokens: None)  # type: ignore[arg-type,return-value]


def _best(rate: float, count: int, per_row: float) -> int:
    goodputs = [
        count * sum(rate**i for i in range(k + 1)) / (1 + per_row * count * (k + 1))
        for k in range(9)
    ]
    return max(range(9), key=lambda k: goodputs[k])


@oracle_test("bandit")
def bandit() -> Iterator[Check]:
    """Draft lengths from samples of the acceptance rate's posterior, replayed from the rounds."""
    with scripted(wordy()) as llm:
        trace = rounds(llm, "bandit:drafter=copyspec,memory=1,fixed=1,per_row=0.1", "abcabcabd", 80)
    random = Random("5/0")
    right = wrong = 0.0
    mistakes, sizes = 0, []
    for one in trace:
        rate = random.betavariate(right + 1, wrong + 1)
        goodputs = [sum(rate**i for i in range(k + 1)) / (1 + 0.1 * (k + 1)) for k in range(9)]
        size = int(np.argmax(goodputs))
        text = one.text
        positions = [s for s in range(len(text) - 3) if text[s : s + 3] == text[-3:]]
        expected = text[positions[0] + 3 : positions[0] + 3 + size] if positions else []
        mistakes += one.tokens != expected
        sizes.append(size)
        if one.tokens:
            right += len(one.accepted)
            wrong += len(one.accepted) < len(one.tokens)
    yield Check("draft lengths equal the replay", mistakes == 0, f"{sizes}")
    yield Check("several draft lengths are tried", len(set(sizes)) > 2)
    yield Check("drafts are accepted", accepted(trace) > 0)
    late = sizes[len(sizes) // 2 :]
    yield Check("drafts get longer once they are accepted", np.mean(late) > np.mean(sizes[:5]))


@oracle_test("pearl")
def pearl() -> Iterator[Check]:
    """Pre-verify while no draft is pending, post-verify while all drafts were accepted; drafting
    and verification overlap."""
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
                    whole = one.generated == [*pending, ahead[0]]
                    pending = ahead[1:] if whole else []
        yield Check(f"T={temperature} equals the two-mode oracle", wrong == 0)
    yield Check("both modes occur", modes == {True, False})
    yield from overlap("pearl:size=4")


@oracle_test("saguaro")
def saguaro() -> Iterator[Check]:
    """Fan-out by the formula; prepared outcomes and drafts equal an oracle's; cache hits save
    time."""
    yield Check(
        "equal acceptance gives equal fan-out", fan_out(3, 8, 0.999999, 0.5)[:3] == [1, 1, 1]
    )
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
                trace = rounds(llm, "saguaro:size=3,fan=2", prompt, temperature=temperature)
                for one, following in zip(trace, trace[1:], strict=False):
                    expected = _outcomes(one.text, one.tokens, temperature)
                    wrong += set(map(tuple, one.entry["prepared"])) != expected
                    outcome = (len(one.accepted), one.generated[-1])
                    hits += following.entry["hit"]
                    misses += not following.entry["hit"]
                    wrong += following.entry["hit"] != (outcome in expected)
                    wrong += following.tokens != _chain(following, temperature)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(
            f"T={temperature}: cache hits and misses occur",
            hits > 0 < misses,
            f"{hits} hits, {misses} misses",
        )
    yield from overlap("saguaro:size=4,fan=3")


def _outcomes(text: list[int], drafts: list[int], temperature: float) -> set[tuple[int, int]]:
    outcomes = set()
    for num_accepted in range(len(drafts) + 1):
        excluded = drafts[num_accepted] if num_accepted < len(drafts) else None
        tokens = list(draft_row(text, tuple(drafts[:num_accepted]), temperature))
        outcomes |= {(num_accepted, token) for token in [t for t in tokens if t != excluded][:2]}
    return outcomes


def _chain(one: TracedRound, temperature: float) -> list[int]:
    """The expected chain: prepared drafts come from the 64 most probable tokens, drafts made on
    demand from all."""
    path: tuple[int, ...] = ()
    for _ in range(3):
        if one.entry["hit"]:
            path = (*path, next(iter(draft_row(one.text, path, temperature))))
        else:
            seen = (*one.text, *path)
            path = (*path, plain_token(SHARP(seen), len(seen), temperature))
    return list(path)

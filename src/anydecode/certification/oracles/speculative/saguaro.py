"""Oracle test of saguaro (Speculative Speculative Decoding, arXiv:2603.03251): the fan-out formula,
the prepared outcomes, and the drafts after a cache hit and after a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    PROMPTS,
    TARGET,
    drafting_time,
    overlap,
)
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.draft_trees import DRAFT as SHARP
from anydecode.certification.oracles.speculative.draft_trees import draft_row
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import (
    TracedRound,
    VirtualClock,
    plain_token,
    rounds,
    scripted,
    wordy,
)
from anydecode.decoders.speculative.saguaro import fan_out
from anydecode.decoders.speculative.smartspec_server import ServerGoodput


@oracle_test("saguaro")
def saguaro() -> Iterator[Check]:
    """Fan-out by the formula; prepared outcomes and drafts equal an oracle's; cache hits save
    time."""
    yield from penalty_checks("saguaro")
    yield Check(
        "equal acceptance gives equal fan-out", fan_out(3, 8, 0.999999, 0.5)[:3] == [1, 1, 1]
    )
    for budget, acceptance in ((20, 0.8), (16, 0.3), (5, 0.95), (4, 0.5)):
        shares = [acceptance ** (k / 1.5) for k in range(4)]
        shares[3] *= (1 - acceptance) ** (-1 / 1.5)
        nearest = _nearest([budget * share / sum(shares) for share in shares], budget)
        yield Check(
            f"fan-out of {budget} over three drafts, acceptance {acceptance}",
            fan_out(3, budget, acceptance, 0.5) == nearest,
            f"{nearest}",
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
    yield from drafting_time("saguaro:size=3,fan=2", in_turn=3, beside=4)
    yield _in_company()
    yield from rejection_checks("saguaro")
    yield from rejection_checks("saguaro", fan=1, discount=0.2)


def _in_company() -> Check:
    """Where the shared budget has two drafts for a request, no more are made, so a draft model that
    is always right takes as many passes as for drafts of two."""
    num_passes = []
    for key in ("saguaro:size=6", "saguaro:size=2"):
        with scripted(TARGET, TARGET) as llm:
            llm.resources = replace(llm.resources, draft_policy=ServerGoodput(max_drafts=2))
            llm.cost_model = FixedCosts(lambda rows, context: 1.0, 1)
            clock = VirtualClock(llm, target=4.0, draft=1.0)
            rounds(llm, key, PROMPTS[0])
            num_passes.append(sum(name == "draft" for name, _, _ in clock.passes))
    return Check(
        "no more is drafted than is verified", num_passes[0] == num_passes[1], f"{num_passes}"
    )


def _nearest(wanted: list[float], budget: int) -> list[int]:
    """The numbers from 1 on with the sum `budget` that are nearest to those wanted, by search."""
    counts = product(range(1, budget), repeat=len(wanted))
    best = min(
        (one for one in counts if sum(one) == budget),
        key=lambda one: sum((a - b) ** 2 for a, b in zip(one, wanted, strict=True)),
    )
    return list(best)


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

"""Oracle test of the bandit: draft lengths replayed from the rounds, and their mean."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import latest_copy
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.rounds import TracedRound, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
MAX_DRAFTS, MEMORY = 8, 0.95


@oracle_test("bandit")
def bandit() -> Iterator[Check]:
    """A draft follows another with a rate drawn from the posterior, anew for each, whose counts
    decay. Samples under the rejection rule follow the target."""
    for temperature in (0.0, 0.8):
        wrong, num_accepted, sizes = 0, 0, set()
        for prompt in PROMPTS:
            with scripted(wordy()) as llm:
                trace = rounds(llm, "bandit", prompt, 80, temperature=temperature)
            chosen = _replay(trace)
            wrong += sum(
                one.tokens != latest_copy(one.text, size)
                for one, size in zip(trace, chosen, strict=True)
            )
            num_accepted += sum(len(one.accepted) for one in trace)
            sizes |= set(chosen)
        yield Check(f"draft lengths equal the replay, T={temperature}", wrong == 0)
        yield Check(f"several are tried, T={temperature}", len(sizes) > 2, f"{sorted(sizes)}")
        yield Check(f"drafts are accepted, T={temperature}", num_accepted > 0, f"{num_accepted}")
    yield from rejection_checks("bandit", prompt=REPEATING)


def _replay(trace: list[TracedRound]) -> list[int]:
    """The draft length of each round."""
    random, sizes = Random("5/0"), []
    outcomes: list[tuple[int, bool]] = []
    for one in trace:
        weights = [MEMORY**age for age in range(len(outcomes) - 1, -1, -1)]
        accepted = sum(w * n for w, (n, _) in zip(weights, outcomes, strict=True))
        rejected = sum(w for w, (_, is_cut) in zip(weights, outcomes, strict=True) if is_cut)
        # The numbers of a round that does not end early: rate, coin, rate, coin, ...
        state, coins = random.getstate(), []
        for _ in range(MAX_DRAFTS - 1):
            rate = random.betavariate(1 + accepted, 1 + rejected)
            coins.append(random.random() < rate)
        length = coins.index(False) if False in coins else len(coins)
        sizes.append(1 + length)
        random.setstate(state)
        for _ in range(min(length + 1, MAX_DRAFTS - 1)):
            random.betavariate(1 + accepted, 1 + rejected)
            random.random()
        if one.tokens:
            outcomes.append((len(one.accepted), len(one.accepted) < len(one.tokens)))
    return sizes

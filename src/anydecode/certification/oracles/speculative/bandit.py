"""Oracle test of the bandit: draft lengths replayed from the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts, latest_copy
from anydecode.certification.rounds import TracedRound, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
MAX_DRAFTS, MEMORY = 8, 0.95


def seconds(rows: int, context: int) -> float:
    """The cost of a pass in the test."""
    return 1 + 0.15 * rows + 0.001 * rows * context


@oracle_test("bandit")
def bandit() -> Iterator[Check]:
    """Every draft has the best length for a rate drawn from the posterior, whose counts decay."""
    for temperature in (0.0, 0.8):
        wrong, num_accepted, sizes = 0, 0, set()
        for prompt in PROMPTS:
            with scripted(wordy()) as llm:
                llm.cost_model = FixedCosts(seconds)
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


def _replay(trace: list[TracedRound]) -> list[int]:
    """The draft length of each round."""
    random, sizes = Random("5/0"), []
    successes: list[tuple[int, bool]] = []
    per_draft = 0.0
    for one in trace:
        ages = range(len(successes) - 1, -1, -1)
        accepted = sum(MEMORY**age * n for age, (n, _) in zip(ages, successes, strict=True))
        rejected = sum(
            MEMORY**age * is_cut for age, (_, is_cut) in zip(ages, successes, strict=True)
        )
        rate = random.betavariate(1 + accepted, 1 + rejected)
        goodputs = [
            sum(rate**i for i in range(k + 1)) / (seconds(k + 1, len(one.text)) + k * per_draft)
            for k in range(MAX_DRAFTS + 1)
        ]
        sizes.append(goodputs.index(max(goodputs)))
        if one.tokens:
            successes.append((len(one.accepted), len(one.accepted) < len(one.tokens)))
            per_draft += (one.entry["draft_seconds"] / len(one.tokens) - per_draft) / 10
    return sizes

"""Drafts of methods without a draft model, compared with oracles that search the whole text in
every round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anydecode.certification.checks import Check
from anydecode.certification.rounds import accepted, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaa", "h")


Chain = Callable[[list[int], int], list[int]]


def compare_chains(
    key: str, oracle: Chain, prompts: tuple[str, ...] = PROMPTS, echo: int = 0
) -> Iterator[Check]:
    """Checks that every drafted chain of `key` equals `oracle(text, prompt length)`."""
    total = 0
    for temperature in (0.0, 0.8):
        with scripted(wordy(echo=echo)) as llm:
            for prompt in prompts:
                trace = rounds(llm, key, prompt, temperature=temperature)
                wrong = [one for one in trace if one.tokens != oracle(one.text, len(prompt))]
                total += accepted(trace)
                yield Check(f"{prompt!r} at T={temperature} equals the oracle", not wrong)
    yield Check("drafts are accepted", total > 0, f"{total}")

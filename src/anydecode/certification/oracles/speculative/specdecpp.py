"""Oracle test of specdec++ (SpecDec++, arXiv:2405.19715): the length of every chain, from the draft
model's probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
)
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import accepted, rounds, scripted


@oracle_test("specdec++")
def specdec() -> Iterator[Check]:
    """A chain ends with the first draft for which 1 - product > bound; that draft is kept. Samples
    under the paper's rejection rule follow the target."""
    for key, bound, min_drafts, size in (
        ("specdec++", 0.7, 2, 20),
        ("specdec++:bound=0.6,min_drafts=3,size=6", 0.6, 3, 6),
    ):
        yield from _compare_chains(key, bound, min_drafts, size)
    yield from rejection_checks("specdec++")


def _compare_chains(key: str, bound: float, min_drafts: int, size: int) -> Iterator[Check]:
    lengths = set()
    # At temperature 0.2 the draft model is confident, so chains reach the maximum length.
    for temperature in (0.0, 0.8, 0.2):
        wrong, num_accepted = 0, 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                trace = rounds(llm, key, prompt, temperature=temperature)
                for one in trace:
                    full = chain_oracle(one.text, size, temperature)
                    product, length = 1.0, 0
                    while length < size:
                        row = DRAFT((*one.text, *full[:length])).astype(float) / (temperature or 1)
                        q = np.exp(row - row.max())
                        product *= q[full[length]] / q.sum()
                        length += 1
                        if length >= min_drafts and 1 - product > bound:
                            break
                    wrong += one.tokens != full[:length]
                    lengths.add(length)
                num_accepted += accepted(trace)
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(
            f"{key} at T={temperature}: drafts are accepted", num_accepted > 0, f"{num_accepted}"
        )
    yield Check(
        f"{key}: chains of the minimum, the maximum and other lengths occur",
        {min_drafts, size} < lengths,
        f"{sorted(lengths)}",
    )

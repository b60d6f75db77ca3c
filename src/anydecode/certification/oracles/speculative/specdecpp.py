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
from anydecode.certification.rounds import accepted, rounds, scripted


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

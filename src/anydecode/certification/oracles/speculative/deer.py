"""Oracle test of DEER: the distributions of the masked block are recomputed."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.masked_drafts import PROMPTS, marginals, open_llm
from anydecode.certification.oracles.speculative.rejection_rules import (
    rejection_checks,
    small_diffusion_llm,
)
from anydecode.certification.rounds import VirtualClock, plain_token, rounds

BLOCK = 16


@oracle_test("deer")
def deer() -> Iterator[Check]:
    """One pass of the draft model per round fills sixteen masks; each is sampled from its own
    distribution, with the target's noise. Samples under the paper's rejection rule follow the
    target."""
    for temperature in (0.0, 0.8):
        wrong = num_accepted = num_rounds = num_passes = 0
        with open_llm() as llm:
            clock = VirtualClock(llm, target=1.0, draft=1.0)
            for prompt in PROMPTS:
                for one in rounds(llm, "deer", prompt, temperature=temperature):
                    rows = marginals(one.text, BLOCK)
                    wrong += one.tokens != [
                        plain_token(row, len(one.text) + ahead, temperature)
                        for ahead, row in enumerate(rows)
                    ]
                    num_accepted += len(one.accepted)
                    num_rounds += 1
            num_passes = sum(runner == "draft" for runner, *_ in clock.passes)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0, f"{num_rounds}")
        yield Check(f"drafts are accepted at T={temperature}", num_accepted > 9, f"{num_accepted}")
        yield Check("one draft pass per round", num_passes == num_rounds, f"{num_passes}")
    yield from rejection_checks("deer", small_diffusion_llm)

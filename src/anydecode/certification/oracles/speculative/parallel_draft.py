"""Oracle test of parallel-draft (PEARL's post-verify phase, arXiv:2408.11850): which drafts were
made in advance, and that drafting and verification overlap."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    PROMPTS,
    TARGET,
    chain_oracle,
    overlap,
)
from anydecode.certification.rounds import blurred, rounds, scripted


@oracle_test("parallel-draft")
def parallel_draft() -> Iterator[Check]:
    """If all drafts were accepted, the next round's draft is the one made in advance; otherwise new
    drafts are made first. Draft and target passes overlap, which saves time over drafting first."""
    near = blurred(TARGET, error=0.4)
    for temperature in (0.0, 0.8):
        wrong, ahead = 0, 0
        with scripted(TARGET, near) as llm:
            for prompt in PROMPTS:
                pending: list[int] = []
                for one in rounds(llm, "parallel-draft:size=4", prompt, temperature=temperature):
                    ahead += bool(pending)
                    fresh = chain_oracle(one.text, 4, temperature, near)
                    wrong += one.tokens != (pending or fresh)
                    further = chain_oracle([*one.text, *one.tokens], 5, temperature, near)
                    whole = one.generated == [*one.tokens, further[0]]
                    pending = further[1:] if whole else []
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        yield Check(f"some drafts were made in advance at T={temperature}", ahead > 0, f"{ahead}")
    yield from overlap("parallel-draft:size=4")

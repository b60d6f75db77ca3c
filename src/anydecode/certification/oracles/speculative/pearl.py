"""Oracle test of pearl (arXiv:2408.11850): the drafts of the pre-verify and post-verify modes, and
that drafting and verification overlap."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
    overlap,
)
from anydecode.certification.rounds import rounds, scripted


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

"""Oracle test of speculative-sampling (Leviathan et al., arXiv:2211.17192): the drafted chains, and
the tokens that verification generates, recomputed from the text."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
)
from anydecode.certification.rounds import plain_token, rounds, scripted


@oracle_test("speculative-sampling")
def speculative_sampling() -> Iterator[Check]:
    """Four tokens sampled by the draft model; the first rejected one is replaced, and if all are
    accepted a bonus token follows."""
    for temperature in (0.0, 0.8):
        with scripted(TARGET, DRAFT) as llm:
            trace = [
                one
                for prompt in PROMPTS
                for one in rounds(llm, "speculative-sampling", prompt, temperature=temperature)
            ]
        wrong = sum(one.tokens != chain_oracle(one.text, 4, temperature) for one in trace)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        wrong = sum(_walk(one.text, one.tokens, temperature) != one.generated for one in trace)
        yield Check(f"the generated tokens at T={temperature} equal the oracle", wrong == 0)
        kinds = {len(one.accepted) for one in trace}
        yield Check(
            "rounds with no and with all drafts accepted occur", {0, 4} <= kinds, f"{kinds}"
        )


def _walk(text: list[int], drafts: list[int], temperature: float) -> list[int]:
    tokens: list[int] = []
    for draft in [*drafts, None]:
        so_far = [*text, *tokens]
        tokens.append(plain_token(TARGET(tuple(so_far)), len(so_far), temperature))
        if tokens[-1] != draft:
            break
    return tokens

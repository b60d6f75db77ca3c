"""Oracle test of speculative-sampling (Leviathan et al., arXiv:2211.17192): the drafted chains, and
the tokens that verification generates, recomputed from the text. The paper's rejection rule: all
outcomes enumerated, a chain by hand, and trees of all kinds through the engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import (
    SAMPLING_OPTIONS,
    distribution_fits,
    expected,
    fit,
    sampled,
    small_llm,
)
from anydecode.certification.oracles.speculative.acceptance_outcomes import (
    TableTrees,
    cases,
    outcome,
)
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
)
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.rounds import plain_token, rounds, scripted
from anydecode.decoders.framework.rejection import RejectionSampling, rejection_steps
from anydecode.decoders.framework.speculation import Speculative


@oracle_test("speculative-sampling")
def speculative_sampling() -> Iterator[Check]:
    """Four tokens sampled by the draft model; the first rejected one is replaced, and if all are
    accepted a bonus token follows."""
    yield from penalty_checks("speculative-sampling")
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
    yield from _rejection()


def _rejection() -> Iterator[Check]:
    """The rule acceptance='rejection'."""
    for kind, width in product(("wor", "iid", "point"), (1, 2, 3)):
        off = max(float(abs(outcome(p, q, kind, width) - p).sum()) for p, q in cases())
        yield Check(f"{width} siblings, {kind}: the outcomes sum to p", off < 1e-12, f"{off:.1e}")
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    (acceptance, rest), *_ = rejection_steps(p, q, "wor", [1])
    yield Check(
        "accepts with p / q, then samples from p - q", _near(acceptance, 0.5) and rest[0] == 1
    )
    (one, _), (two, rest) = rejection_steps(p, q, "wor", [1, 0])
    yield Check("the second sibling is compared with q exclude_token the first", _near(two, 1.0))
    (one, _), (two, rest) = rejection_steps(p, q, "point", [0, 1])
    by_hand = _near(one, 0.5) and _near(two, 0.6) and rest[2] == 1
    yield Check("siblings drawn as point masses are accepted with the residual of p", by_hand)
    for kind in ("wor", "iid", "point"):
        with small_llm() as llm:
            decoder = Speculative(TableTrees(kind), acceptance=RejectionSampling())
            result = fit(
                sampled(llm, decoder, SAMPLING_OPTIONS["a grammar"]),
                expected(SAMPLING_OPTIONS["a grammar"]),
            )
        yield Check(f"trees of siblings, {kind}, a grammar", result.passed, str(result))

    build = partial(catalogue.build, "speculative-sampling", acceptance="rejection")
    for name, result in distribution_fits(build).items():
        yield Check(f"rejection: follows the target, {name}", result.passed, str(result))


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-12


def _walk(text: list[int], drafts: list[int], temperature: float) -> list[int]:
    tokens: list[int] = []
    for draft in [*drafts, None]:
        so_far = [*text, *tokens]
        tokens.append(plain_token(TARGET(tuple(so_far)), len(so_far), temperature))
        if tokens[-1] != draft:
            break
    return tokens

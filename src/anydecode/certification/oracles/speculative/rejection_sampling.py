"""Oracle test of rejection-sampling (Leviathan et al., arXiv:2211.17192): all outcomes enumerated,
a chain by hand, and trees of all kinds through the engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import SAMPLING_OPTIONS, expected, fit, sampled, small_llm
from anydecode.certification.oracles.speculative.acceptance_outcomes import (
    TableTrees,
    cases,
    outcome,
)
from anydecode.decoders.framework.rejection import RejectionSampling, rejection_steps
from anydecode.decoders.framework.speculation import Speculative


@oracle_test("rejection-sampling")
def rejection() -> Iterator[Check]:
    """Rejection sampling: all outcomes enumerated, a chain by hand, and trees of all three kinds
    through the engine."""
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


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-12

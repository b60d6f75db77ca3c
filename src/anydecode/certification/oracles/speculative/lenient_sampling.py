"""Oracle test of lenient-sampling (Leviathan et al., arXiv:2211.17192, A.5): the acceptance
probability, and the bound p / lenience on every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import PROMPT, VOCABULARY, expected, sampled, small_llm
from anydecode.certification.oracles.speculative.acceptance_outcomes import Ladder, cases, outcome
from anydecode.certification.oracles.speculative.close_drafts import rule_checks, saves_passes
from anydecode.decoders.framework.rejection import rejection_steps
from anydecode.decoders.speculative.lenient_sampling import lenient_sampling


@oracle_test("lenient-sampling")
def lenient() -> Iterator[Check]:
    """Lenience raises the acceptance probability as the formula says, and bounds every token by p /
    lenience. At temperature 0 drafts are accepted while they are at least half as probable as the
    most probable token."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    acceptances = [
        next(rejection_steps(p, q, "wor", [1], lenience))[0] for lenience in (1.0, 0.8, 0.5)
    ]
    yield Check("accepts with p / (lenience q)", np.allclose(acceptances, [0.5, 0.625, 1.0]))
    for lenience in (0.9, 0.5, 0.2):
        above = max(
            float((outcome(p, q, "wor", 1, lenient_steps(lenience)) - p / lenience).max())
            for p, q in cases()
        )
        yield Check(f"lenience {lenience}: no token above p / lenience", above < 1e-12)
    passes = []
    for lenience in (1.0, 0.5, 0.1):
        with small_llm() as llm:
            options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 150}
            answer = llm.generate(
                PROMPT, decoder=f"lenient-sampling:lenience={lenience}", **options
            )
        passes.append(answer.stats.passes)
    fewer = passes[0] > passes[1] > passes[2]
    yield Check("a smaller lenience accepts more drafts", fewer, f"{passes} passes")

    def rule(logits: np.ndarray, draft: int, temperature: float) -> bool:
        p = np.exp((logits - logits.max()).astype(np.float64))
        return bool(p[draft] >= 0.5 * p.max())

    yield from rule_checks("lenient-sampling", rule, (0.0,))
    yield saves_passes("lenient-sampling", temperature=0.0)


def lenient_steps(lenience: float) -> Ladder:
    return lambda p, q, kind, tokens: rejection_steps(p, q, kind, tokens, lenience)


@measure("lenient-sampling", "share above p / lenience", samples=500, margin=0.06)
def lenient_loss(samples: int) -> float:
    """By how much the frequency of any first token exceeds p / lenience."""
    with small_llm() as llm:
        texts = sampled(llm, lenient_sampling(lenience=0.5), {}, samples)
    shares = np.bincount([text[0] for text in texts], minlength=VOCABULARY) / samples
    p = np.zeros(VOCABULARY)
    for text, probability in expected({}).items():
        p[text[0]] += probability
    return float((shares - p / 0.5).max())

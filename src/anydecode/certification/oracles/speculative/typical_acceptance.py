"""Oracle test of typical acceptance: the threshold recomputed for every draft."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import PROMPT, TARGET_SCRIPT
from anydecode.certification.oracles.speculative.close_drafts import (
    close_llm,
    rule_checks,
    saves_passes,
)

#: The values of Medusa's released code, where delta is the square root of epsilon.
EPSILON, DELTA = 0.09, 0.3


@oracle_test("typical-acceptance")
def typical() -> Iterator[Check]:
    """Drafts are accepted while p > min(epsilon, delta exp(-H)); at temperature 0, while they are
    the most probable token."""
    bounds: list[bool] = []

    def rule(logits: np.ndarray, draft: int, temperature: float) -> bool:
        if not temperature:
            return draft == int(logits.argmax())
        weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
        p = weights / weights.sum()
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        bounds.append(bool(DELTA * np.exp(-entropy) < EPSILON))
        return bool(p[draft] > min(EPSILON, DELTA * np.exp(-entropy)))

    yield from rule_checks("typical-acceptance", rule, (0.0, 0.8))
    detail = f"{sum(bounds)} of {len(bounds)} by entropy"
    yield Check("both terms of the threshold occur", 0 < sum(bounds) < len(bounds), detail)
    yield saves_passes("typical-acceptance", temperature=0.9)


@measure("typical-acceptance", "log-likelihood lost per token", samples=60, margin=0.3)
def typical_loss(samples: int) -> float:
    """Nats per token by which the text of plain sampling is more probable under the target."""
    return _likelihood("autoregressive", samples) - _likelihood("typical-acceptance", samples)


def _likelihood(decoder: str, samples: int) -> float:
    """Mean log-probability under the target of sampled tokens, over `samples` texts of eight."""
    with close_llm() as llm:
        answer = llm.generate(
            PROMPT, decoder=decoder, n=samples, temperature=1.0, seed=2, max_tokens=8
        )
    total = 0.0
    for sample in answer.samples:
        text = list(PROMPT)
        for token in sample.tokens:
            logits = TARGET_SCRIPT(tuple(text)).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
            text.append(token)
    return total / (8 * samples)

"""A decoder compared with the naive implementation of its rule, over scripted logits."""

from __future__ import annotations

from anydecode.certification.checks import Check
from anydecode.certification.denoising import (
    CONFIDENT,
    Logits,
    UnmaskingRule,
    bidirectional,
    naive,
    steps,
)


def same_steps(
    name: str, decoder: str, rule: UnmaskingRule, block: int = 12, script: Logits = CONFIDENT
) -> Check:
    """Compares text and positions per pass over 24 masks in blocks of `block`."""
    with bidirectional(script) as llm:
        return Check(name, steps(llm, decoder, 24) == naive(script, 24, block, rule))


def threshold_rule(threshold: float) -> UnmaskingRule:
    return lambda state: (
        [i for i in state.probabilities if state.max_probability(i) >= threshold]
        or state.order()[:1]
    )

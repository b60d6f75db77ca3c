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
    name: str,
    decoder: str,
    rule: UnmaskingRule,
    block: int = 12,
    script: Logits = CONFIDENT,
    length: int = 24,
) -> Check:
    """Compares text and positions per pass over `length` masks in blocks of `block`."""
    with bidirectional(script) as llm:
        return Check(name, steps(llm, decoder, length) == naive(script, length, block, rule))


def default_steps(key: str, rule: UnmaskingRule, script: Logits = CONFIDENT) -> Check:
    """Compares `key` without parameters with `rule` in blocks of 32: a whole one and a part of
    one."""
    name = "the default parameters are the published ones"
    return same_steps(name, key, rule, block=32, script=script, length=40)


def threshold_rule(threshold: float) -> UnmaskingRule:
    return lambda state: (
        [i for i in state.probabilities if state.max_probability(i) >= threshold]
        or state.order()[:1]
    )

"""Oracle test of top-m acceptance: the rank recomputed for every draft."""

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
from anydecode.decoders.framework.acceptance import TopMAcceptance


@oracle_test("top-m-acceptance")
def top_m() -> Iterator[Check]:
    """Drafts are accepted while they are among the two most probable tokens, at any temperature;
    the gap and the minimum block by hand."""

    def rule(logits: np.ndarray, draft: int, temperature: float) -> bool:
        return draft in sorted(range(len(logits)), key=lambda token: -logits[token])[:2]

    yield from rule_checks("top-m-acceptance", rule, (0.0, 0.8))
    yield saves_passes("top-m-acceptance", temperature=0.0)
    p = np.array([0.25, 0.4, 0.1, 0.25])
    ranked = TopMAcceptance(2).passes(p, [0, 1, 2, 3], 1)
    yield Check("ties go to the lower id", ranked == [True, True, False, False])
    for gap, accepted in ((0.4, [False, True]), (0.5, [True, True])):
        result = TopMAcceptance(3, gap=gap).passes(p, [0, 1], 1)
        yield Check(f"a gap of {gap} nats", result == accepted)  # log(0.4 / 0.25) = 0.47
    block = [TopMAcceptance(1, block=3).passes(p, [2], depth) for depth in (1, 2, 3)]
    name = "the first `block` - 1 drafts are accepted unconditionally"
    yield Check(name, block == [[True], [True], [False]])


@measure(
    "top-m-acceptance", "share of tokens beyond the two most probable", samples=240, margin=0.0
)
def top_m_loss(samples: int) -> float:
    """Measured at temperature 0, over `samples` tokens."""
    with close_llm() as llm:
        tokens = llm.generate(PROMPT, decoder="top-m-acceptance", max_tokens=samples).tokens
    text, beyond = list(PROMPT), 0
    for token in tokens:
        logits = TARGET_SCRIPT(tuple(text))
        beyond += int((logits > logits[token]).sum() >= 2)
        text.append(token)
    return beyond / samples

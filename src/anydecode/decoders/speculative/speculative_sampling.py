"""Speculative sampling with a draft model (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", arXiv:2211.17192; Chen et al., arXiv:2302.01318).

A smaller model drafts a chain of tokens, one pass per token. The target verifies the whole chain in
one pass."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    CHAIN_NOISE,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "speculative-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)",
        exactness="token-exact",
        summary="A smaller model drafts a chain of tokens; the target verifies them in one pass.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly with shared noise; the paper's rejection rule is"
            " acceptance='rejection'",
            CHAIN_NOISE + "; it accepts at least (1 - d) / (1 + d), where the rule accepts 1 - d"
            " (d: total variation distance of the two distributions)",
        ),
        remote={
            "size": Range(1, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def speculative_sampling(
    size: int = 4, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Speculative sampling with a draft model.

    Args:
        size: Number of drafts per round.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(ModelDrafter(rule), size, rule)

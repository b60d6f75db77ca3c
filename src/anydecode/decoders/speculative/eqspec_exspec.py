"""EqSpec and ExSpec: batched speculation with ragged acceptance, across requests of any length
(Zhang et al., "Batch Speculative Decoding Done Right", arXiv:2510.22876).

The rows of a batch accept different numbers of drafts. EqSpec realigns them in each round; ExSpec
groups requests of equal length, so that this is rarely needed. Here caches map positions to slots
one by one, so rows of any length share a pass without either, and the two are one method.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "eqspec-exspec",
        "speculative",
        paper="Batch Speculative Decoding Done Right (arXiv:2510.22876), EqSpec and ExSpec",
        exactness="token-exact",
        summary="Batched speculation with ragged acceptance across requests of any length.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "rows are not unpadded, appended and padded again, since the cache is paged",
            "requests are not sorted or grouped by length: every pass takes all of them",
            "verified token-exactly at any temperature (the paper: greedy); acceptance='rejection'"
            " is the rule of speculative sampling",
            CHAIN_NOISE,
        ),
        remote={
            "size": Range(1, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def eqspec_exspec(
    size: int = 5,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Batched speculation with ragged acceptance.

    Args:
        size: Number of drafts per round.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(ModelDrafter(rule), size, rule)

"""ExSpec: batched speculation across requests of any length (Zhang et al., "Batch Speculative
Decoding Done Right", arXiv:2510.22876).

The rows of a batch accept different numbers of drafts. Caches map positions to slots one by one, so
rows of any length share a pass, without grouping and without copies."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "exspec",
        "speculative",
        paper="Batch Speculative Decoding Done Right (arXiv:2510.22876)",
        exactness="token-exact",
        summary="Batched speculation across requests of any length.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "requests are not sorted or grouped by length: every pass takes all of them",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
        remote={"size": Range(0, 64)},
    )
)
def exspec(size: int = 5) -> Speculative:
    """ExSpec: batched speculation across requests of different lengths.

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(), size)

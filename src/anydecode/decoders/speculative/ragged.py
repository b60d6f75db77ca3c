"""Batched speculation with ragged acceptance (Zhang et al., "Batch Speculative Decoding Done
Right", arXiv:2510.22876).

The rows of a batch accept different numbers of drafts. Caches map positions to slots one by one, so
ragged rows need no realignment (EqSpec) and no grouping by length (ExSpec): any rows share a pass,
and no row is copied.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter

_WORKS_WITH = ("constraints", "samplers", "guidance", "batches", "adapters")
_PAPER = "Batch Speculative Decoding Done Right (arXiv:2510.22876)"


@register(
    Card(
        "eqspec",
        "speculative",
        paper=_PAPER,
        exactness="token-exact",
        summary="Batched speculation with ragged acceptance; each output equals the unbatched one.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=(
            "rows are not unpadded, appended and padded again, since the cache is paged",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
    )
)
def eqspec(size: int = 5) -> Speculative:
    """EqSpec: batched speculation with ragged acceptance.

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(), size)


@register(
    Card(
        "exspec",
        "speculative",
        paper=_PAPER,
        exactness="token-exact",
        summary="Batched speculation across requests of any length.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=(
            "requests are not sorted or grouped by length: every pass takes all of them",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
    )
)
def exspec(size: int = 5) -> Speculative:
    """ExSpec: batched speculation across requests of different lengths.

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(), size)

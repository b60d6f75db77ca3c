"""EqSpec: batched speculation with ragged acceptance (Zhang et al., "Batch Speculative Decoding
Done Right", arXiv:2510.22876).

The rows of a batch accept different numbers of drafts. Caches map positions to slots one by one, so
ragged rows need no realignment.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "eqspec",
        "speculative",
        paper="Batch Speculative Decoding Done Right (arXiv:2510.22876)",
        exactness="token-exact",
        summary="Batched speculation with ragged acceptance; each output equals the unbatched one.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "rows are not unpadded, appended and padded again, since the cache is paged",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
        remote={"size": Range(0, 64)},
    )
)
def eqspec(size: int = 5) -> Speculative:
    """EqSpec: batched speculation with ragged acceptance.

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(), size)

"""Batches whose rows accept different numbers of drafts (Zhang et al., "Batch Speculative Decoding
Done Right", arXiv:2510.22876). Contexts map positions to slots one by one, so ragged rows need no
realignment (EqSpec) and no grouping by length (ExSpec): any rows share a pass, none is copied."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter

_WORKS = ("constraints", "samplers", "guidance", "batches", "adapters")
_PAPER = "Batch Speculative Decoding Done Right (arXiv:2510.22876)"


@register(
    Card(
        "eqspec",
        "speculative",
        paper=_PAPER,
        exactness="token-exact",
        summary="Batched speculation with ragged acceptance; outputs equal each row's own.",
        needs=("draft model",),
        works_with=_WORKS,
        deviations=(
            "nothing is unpadded, appended and padded again: memory is paged",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
    )
)
def eqspec(size: int = 5) -> Speculative:
    """Chains of `size` drafts; ragged acceptance costs nothing."""
    return Speculative(ModelDrafter(), size)


@register(
    Card(
        "exspec",
        "speculative",
        paper=_PAPER,
        exactness="token-exact",
        summary="Batched speculation across requests of any length.",
        needs=("draft model",),
        works_with=_WORKS,
        deviations=(
            "requests are not sorted or grouped by length: every pass takes all of them",
            "verified token-exactly at any temperature (the paper: greedy)",
        ),
    )
)
def exspec(size: int = 5) -> Speculative:
    """Chains of `size` drafts; requests of different length share every pass."""
    return Speculative(ModelDrafter(), size)

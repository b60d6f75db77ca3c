"""Drafts of a smaller model under the rejection rule (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", arXiv:2211.17192)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "rejection-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)",
        exactness="distribution-exact",
        summary=(
            "Drafts of a smaller model are accepted with min(1, p/q); a rejected"
            " one is resampled from p - q."
        ),
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        remote={"size": Range(0, 64)},
    )
)
def rejection_sampling(size: int = 4) -> Speculative:
    """Speculative decoding with the rejection rule (Leviathan et al., arXiv:2211.17192).

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(with_probabilities=True), size, RejectionSampling())

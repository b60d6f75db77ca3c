"""Drafts of a smaller model under typical acceptance (Cai et al., "Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads", arXiv:2401.10774)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import TypicalAcceptance
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "typical-acceptance",
        "speculative",
        paper="Medusa (arXiv:2401.10774), its acceptance rule",
        exactness="lossy",
        summary=(
            "Drafts are accepted if their probability is above a threshold set by"
            " the target's entropy."
        ),
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "drafts come from a smaller model, not from trained heads",
            "the token behind the accepted drafts is sampled as plain decoding samples it; in the"
            " released code it is the most probable one at every temperature, unless fast=False",
        ),
        remote={"size": Range(1, 64), "epsilon": Range(0, 1), "delta": Range(0, 1)},
    )
)
def typical_acceptance(size: int = 4, epsilon: float = 0.09, delta: float = 0.3) -> Speculative:
    """Speculative decoding with typical acceptance (Cai et al., Medusa, arXiv:2401.10774).

    Args:
        size: Number of drafts per round.
        epsilon: Upper bound of the threshold.
        delta: The threshold is min(epsilon, delta exp(-entropy)).
    """
    return Speculative(ModelDrafter(), size, TypicalAcceptance(epsilon, delta))

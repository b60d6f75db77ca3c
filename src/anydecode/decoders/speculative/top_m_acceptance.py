"""Drafts of a smaller model under top-m acceptance (Stern et al., "Blockwise Parallel Decoding for
Deep Autoregressive Models", arXiv:1811.03115)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import TopMAcceptance
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


@register(
    Card(
        "top-m-acceptance",
        "speculative",
        paper="Blockwise Parallel Decoding (arXiv:1811.03115), its relaxed rules; GAD++"
        " (arXiv:2203.16487), its gap",
        exactness="lossy",
        summary="Drafts are accepted if they are among the target's most probable tokens.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "drafts come from a smaller model, not from trained heads",
            "the distance rule for ordered outputs is not included, since tokens have no order",
        ),
        remote={
            "size": Range(1, 64),
            "count": Range(1, 1024),
            "gap": Range(0, 100),
            "block": Range(1, 64),
        },
    )
)
def top_m_acceptance(
    size: int = 4, count: int = 2, gap: float | None = None, block: int = 1
) -> Speculative:
    """Speculative decoding with top-m acceptance (Stern et al., arXiv:1811.03115).

    Args:
        size: Number of drafts per round.
        count: Drafts among so many most probable tokens are accepted.
        gap: Maximum distance from the most probable token, in nats; None: any.
        block: Minimum number of tokens emitted per pass.
    """
    return Speculative(ModelDrafter(), size, TopMAcceptance(count, gap, block))

"""Every mask of little entropy at once (Chen et al., "dParallel: Learnable Parallel Decoding for
dLLMs", arXiv:2509.26488): the decoding rule for models distilled to be certain early
(`anydecode train diffusion --method dparallel`)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking


@register(
    Card(
        "dparallel",
        "diffusion",
        paper="dParallel (arXiv:2509.26488)",
        exactness="lossy",
        summary="Fills every mask whose entropy is small; made for certainty-distilled models.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("runs on any diffusion model; the paper's figures need a distilled one",),
    )
)
def dparallel(
    entropy: float = 0.5, block: int | None = None, cache: str = "none", mask: int | None = None
) -> Denoiser:
    """Commits masks of at most `entropy` nats."""
    return Denoiser(
        FixedBlocks(block), Entropy(), ThresholdUnmasking(-entropy), cache_named(cache), mask=mask
    )

"""dParallel (Chen et al., "dParallel: Learnable Parallel Decoding for dLLMs", arXiv:2509.26488).

Each step unmasks every mask with an entropy below a bound. The rule is made for models distilled to
be certain early (`anydecode train distil --method dparallel`).
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking


@register(
    Card(
        "dparallel",
        "diffusion",
        paper="dParallel (arXiv:2509.26488)",
        exactness="lossy",
        summary="Unmasks every mask with low entropy; made for certainty-distilled models.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "runs on any diffusion model; the paper's results need a distilled one, and the"
            " distillation trains models with the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE",
            "the distillation trains all weights, the paper's low-rank adapters",
        ),
        remote={
            "entropy": Range(0, 100),
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
        },
    )
)
def dparallel(
    entropy: float = 0.5, block: int | None = None, cache: str = "none", mask: int | None = None
) -> Denoiser:
    """Denoises with a bound on the entropy.

    Args:
        entropy: Masks with at most this entropy, in nats, are unmasked.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    blocks, policy = blocks_and_cache(block, cache)
    return Denoiser(blocks, Entropy(), ThresholdUnmasking(-entropy), policy, mask=mask)

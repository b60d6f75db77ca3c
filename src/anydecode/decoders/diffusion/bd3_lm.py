"""BD3-LM: blocks are denoised from left to right over an exact key-value cache, one random mask per
step (Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
Models", arXiv:2503.09573)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import DEVIATIONS, BlockCausalCache
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Random
from anydecode.decoders.diffusion.unmasking import (
    ThresholdUnmasking,
)

_WORKS_WITH = ("batches", "samplers", "constraints", "streaming", "infilling")


@register(
    Card(
        "bd3-lm",
        "diffusion",
        paper="Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models"
        " (arXiv:2503.09573); Masked Diffusion Models are Secretly Time-Agnostic Masked Models and"
        " Exploit Inaccurate Categorical Sampling (arXiv:2409.02908)",
        exactness="lossy",
        summary="Blocks over an exact cache; unmasks one mask at a time in random order.",
        needs=("block-diffusion model",),
        works_with=_WORKS_WITH,
        deviations=(
            *DEVIATIONS,
            "the model must have no time input or a constant one, as the published models have",
        ),
        remote={"block": Range(1, 4096)},
    )
)
def bd3_lm(block: int | None = None, mask: int | None = None) -> Denoiser:
    """The first-hitting sampler: each step unmasks one mask, chosen at random.

    Args:
        block: Positions per block (default: the model's own block size).
        mask: The mask token (default: the tokenizer's).
    """
    cache = BlockCausalCache(block)
    return Denoiser(FixedBlocks(block), Random(), ThresholdUnmasking(2.0), cache, mask=mask)

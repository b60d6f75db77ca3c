"""Parallel decoding by confidence, over approximate caches (Wu et al., "Fast-dLLM: Training-free
Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding", arXiv:2505.22618)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_of
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.unmasking import FactorUnmasking, ThresholdUnmasking, UnmaskPolicy
from anydecode.errors import InvalidRequestError


@register(
    Card(
        "fast-dllm",
        "diffusion",
        paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and"
        " Parallel Decoding (arXiv:2505.22618)",
        exactness="lossy",
        summary="Fills every mask the model is sure of, and computes little but the block.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "lossless against nothing: cached rows are those of the pass that opened the block",
            "a model with shifted logits computes one row more on the left of a slice, where the"
            " paper fills the first position of a block in the full pass",
            "the factor rule takes the largest n that fits, as the paper has it; its code stops at"
            " the first that does not",
        ),
    )
)
def fast_dllm(
    threshold: float = 0.9,
    factor: float | None = None,
    block: int | None = None,
    cache: str = "dual",
    length: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """Fills what is predicted with at least `threshold`, or by `factor` instead. `block` masks at a
    time (0: the whole canvas; default: up to 32). `cache` is "dual", "prefix" or "none"."""
    if not 0 <= threshold <= 1:
        raise InvalidRequestError("the threshold must be between 0 and 1")
    unmask: UnmaskPolicy = (
        ThresholdUnmasking(threshold) if factor is None else FactorUnmasking(factor)
    )
    return Denoiser(
        FixedBlocks(block), unmask=unmask, cache=cache_of(cache), mask=mask, length=length
    )

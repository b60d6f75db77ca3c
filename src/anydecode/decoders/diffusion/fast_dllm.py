"""Fast-dLLM (Wu et al., "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV
Cache and Parallel Decoding", arXiv:2505.22618).

Each step unmasks every mask above a confidence threshold, or as many as a rule on the confidences
allows. Rows outside of the block come from an approximate key-value cache.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.unmasking import FactorUnmasking, ThresholdUnmasking, UnmaskPolicy
from anydecode.errors import InvalidRequestError


@register(
    Card(
        "fast-dllm",
        "diffusion",
        paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and"
        " Parallel Decoding (arXiv:2505.22618)",
        exactness="lossy",
        summary="Unmasks every confident mask; computes only the block, against cached rows.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "with a cache, the output differs from that without: cached rows are those of the pass"
            " that opened the block",
            "with shifted logits, the row before the block is computed as well; the paper predicts"
            " the first position of a block in the full pass instead",
            "the factor rule takes the largest n that satisfies it, as in the paper; the released"
            " code stops at the first that does not",
        ),
        remote={
            "threshold": Range(0, 1),
            "factor": Range(0, 100),
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
            "length": Range(1, 4096),
        },
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
    """Denoises in blocks with a confidence threshold and a cache.

    Args:
        threshold: Masks with at least this confidence are unmasked.
        factor: If given, replaces the threshold: the n most confident masks are unmasked, for the
            largest n with (n + 1) (1 - confidence of the n-th) < `factor`.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        length: The number of masks of a canvas (default: max_tokens).
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= threshold <= 1:
        raise InvalidRequestError(f"threshold must be between 0 and 1, not {threshold}")
    unmask: UnmaskPolicy = (
        ThresholdUnmasking(threshold) if factor is None else FactorUnmasking(factor)
    )
    blocks, policy = blocks_and_cache(block, cache)
    return Denoiser(blocks, unmask=unmask, cache=policy, mask=mask, length=length)

"""Fast-dLLM v2: blocks over an exact cache, each filled in sub-blocks from left to right (Wu et
al., "Fast-dLLM v2: Efficient Block-Diffusion LLM", arXiv:2509.26328).

The model's logits are shifted, so the first token of a block is predicted before the block, by the
last row of the finished one. Within a block, each step unmasks the confident masks of the first
sub-block that has masks; optionally it computes the rows of that sub-block only.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.caches import DEVIATIONS
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.sub_blocks import SeededCache, SubBlockCache, SubBlocks
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, TopKUnmasking
from anydecode.errors import InvalidRequestError

CACHES = ("none", "dual")


@register(
    Card(
        "fast-dllm-v2",
        "diffusion",
        paper="Fast-dLLM v2: Efficient Block-Diffusion LLM (arXiv:2509.26328)",
        exactness="lossy",
        summary="Blocks over an exact cache, filled in sub-blocks above a threshold.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            *DEVIATIONS,
            "with logits in place, the first position of a block is predicted like the others,"
            " unless the context before the block predicts next tokens",
        ),
        remote={
            "block": Range(1, 4096),
            "sub_block": Range(1, 4096),
            "threshold": Range(0, 1),
            "cache": Words(CACHES),
        },
    )
)
def fast_dllm_v2(
    block: int | None = None,
    sub_block: int = 8,
    threshold: float = 0.95,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises block by block, and each block in sub-blocks from the left.

    Args:
        block: Positions per block (default: the model's own block size).
        sub_block: Positions per sub-block.
        threshold: In every step, the masks of the sub-block with more confidence are unmasked, at
            least the best one.
        cache: "none" computes the rows of the block in every step; "dual" those of the sub-block,
            against the older rows of the others, once its first position is unmasked.
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= threshold <= 1:
        raise InvalidRequestError(f"threshold must be between 0 and 1, not {threshold}")
    if cache not in CACHES:
        raise InvalidRequestError(
            f"cache={cache!r} is unknown; finished blocks are cached always, and what is cached of"
            " the open one must be one of none, dual"
        )
    parts = SubBlocks(sub_block)
    rows = SubBlockCache(block, parts) if cache == "dual" else SeededCache(block)
    unmask = ThresholdOrSchedule(threshold, TopKUnmasking())
    return Denoiser(parts, unmask=unmask, cache=rows, mask=mask, tempered=True)

"""The cache policies that decoders offer as `cache=`, by name."""

from __future__ import annotations

from collections.abc import Callable

from anydecode.catalogue import Words
from anydecode.decoders.diffusion.approximate_caches import (
    DualCachePolicy,
    PrefixCachePolicy,
    VicinityCachePolicy,
    WindowCachePolicy,
)
from anydecode.decoders.diffusion.blocks import BlockPolicy, FixedBlocks
from anydecode.decoders.diffusion.caches import BlockCausalCache, CachePolicy, NoCache
from anydecode.decoders.diffusion.elastic_policy import ElasticCachePolicy
from anydecode.decoders.diffusion.sub_blocks import SubBlockCache, SubBlocks
from anydecode.errors import UnsupportedCombinationError

#: "block" is exact and for models with blocks of their own; "none" is exact.
CACHES: dict[str, Callable[[], CachePolicy]] = {
    "none": NoCache,
    "prefix": PrefixCachePolicy,
    "dual": DualCachePolicy,
    "vicinity": VicinityCachePolicy,
    "window": WindowCachePolicy,
    "elastic": ElasticCachePolicy,
    "block": BlockCausalCache,
}
CACHE_WORDS = Words(tuple(CACHES))
#: The caches whose passes read embeddings that a method gives.
EMBEDDED_CACHES = tuple(name for name in CACHES if name != "elastic")
EMBEDDED_WORDS = Words(EMBEDDED_CACHES)
#: The caches with which a pass can score several canvases at any time.
DRAFT_CACHES = ("none", "prefix", "dual", "block")
#: The caches that change no logits: for methods that revise tokens, or predict several blocks.
EXACT_CACHES = ("none", "block")
EXACT_WORDS = Words(EXACT_CACHES)


#: The caches of methods with blocks of equal size. "hierarchical" fills the blocks of a model in
#: sub-blocks (Fast-dLLM v2): finished blocks are exact, the rows of the open one are older.
BLOCKWISE_CACHES = (*CACHES, "hierarchical")
BLOCKWISE_WORDS = Words(BLOCKWISE_CACHES)
#: Positions per sub-block, if none are given.
_SUB_BLOCK = 8


def blocks_and_cache(
    block: int | None, name: str, allowed: tuple[str, ...] = BLOCKWISE_CACHES
) -> tuple[BlockPolicy, CachePolicy]:
    """The block policy and the cache policy of a method with blocks of equal size.

    Args:
        block: Positions per block; with the hierarchical cache, per sub-block (default: 8).
        name: The cache, one of `allowed`.

    Raises:
        UnsupportedCombinationError: There is no such cache.
    """
    if name == "hierarchical" and name in allowed:
        parts = SubBlocks(block or _SUB_BLOCK)
        return parts, SubBlockCache(None, parts)
    return FixedBlocks(block), cache(name, allowed)


def cache(name: str, allowed: tuple[str, ...] = CACHE_WORDS.words) -> CachePolicy:
    """The cache policy of a given name, one of `allowed`.

    Raises:
        UnsupportedCombinationError: There is no such policy.
    """
    if name not in allowed:
        raise UnsupportedCombinationError(
            f"cache={name!r} is unknown; it must be one of {', '.join(allowed)}"
        )
    return CACHES[name]()

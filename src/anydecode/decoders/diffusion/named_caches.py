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
#: The caches that change no logits: for methods that predict more than the masks of a block.
EXACT_CACHES = ("none", "block")
EXACT_WORDS = Words(EXACT_CACHES)
#: The caches whose passes compute the whole open block: for methods that revise its tokens.
REVISING_CACHES = ("none", "prefix", "dual", "vicinity", "block")
REVISING_WORDS = Words(REVISING_CACHES)

#: The caches of methods with blocks of equal size. "hierarchical" fills the blocks of a model in
#: sub-blocks (Fast-dLLM v2): finished blocks are exact, the rows of the open one are older.
BLOCKWISE_CACHES = (*CACHES, "hierarchical")
BLOCKWISE_WORDS = Words(BLOCKWISE_CACHES)
#: Why a method that takes some caches takes no others.
_REASONS = {
    EXACT_CACHES: "this method predicts more in a pass than the masks of a block, and passes of"
    " such a cache compute no more",
    REVISING_CACHES: "this method also predicts tokens, to revise them, and passes of such a cache"
    " compute masks",
    DRAFT_CACHES: "a pass of this method scores several canvases, and a pass that refreshes such a"
    " cache can score only one",
    EMBEDDED_CACHES: "this method gives the model embeddings, and passes of such a cache read"
    " tokens",
}
_NO_PARTS = "this method does not fill the blocks of a model in parts of equal size"
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
        UnsupportedCombinationError: There is no such policy, or it is not allowed.
    """
    if name in allowed:
        return CACHES[name]()
    why = _REASONS.get(allowed) if name in CACHES else None
    if name == "hierarchical":
        why = _NO_PARTS
    verdict = f"does not work here, since {why}" if why else "is unknown"
    raise UnsupportedCombinationError(
        f"cache={name!r} {verdict}; it must be one of {', '.join(allowed)}"
    )

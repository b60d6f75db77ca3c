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
from anydecode.decoders.diffusion.caches import BlockCausalCache, CachePolicy, NoCache
from anydecode.errors import UnsupportedCombinationError

#: "block" is exact and for models with blocks of their own; "none" is exact.
CACHES: dict[str, Callable[[], CachePolicy]] = {
    "none": NoCache,
    "prefix": PrefixCachePolicy,
    "dual": DualCachePolicy,
    "vicinity": VicinityCachePolicy,
    "window": WindowCachePolicy,
    "block": BlockCausalCache,
}
CACHE_WORDS = Words(tuple(CACHES))
#: The caches with which a pass can score several canvases at any time.
DRAFT_CACHES = ("none", "prefix", "dual", "block")
#: The caches whose rows do not depend on tokens that may change.
REVISING_CACHES = ("none", "block")
REVISING_WORDS = Words(REVISING_CACHES)


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

"""MiniMax-M2 (MiniMax, 2025)."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, head_dim, int_value, rotary_share

_NAME = "MiniMaxM2ForCausalLM"


def _rotary_share(config: Config) -> dict[str, Any]:
    """Published configs have the rotary size of a head."""
    if config.get("rotary_dim") is None:
        return {}
    dim = head_dim(config)
    size = int_value(config, "rotary_dim", high=dim)
    return {"partial_rotary_factor": rotary_share(size, dim)}


FAMILIES = {
    "minimax_m2": Family(
        (_NAME,),
        all_full,
        # Early configs have the model type of MiniMax-01.
        is_own=lambda config: _NAME in (config.get("architectures") or ()),
        qk_norm="full",
        has_partial_rotary=True,
        derived=_rotary_share,
        defaults={"head_dim": 128, "rope_theta": 5e6},
        moe=MixtureOfExperts("intermediate_size", scoring="sigmoid", has_selection_bias=True),
    )
}

"""MiniMax-M2 (MiniMax, 2025)."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import rotary_size

_NAME = "MiniMaxM2ForCausalLM"


FAMILIES = {
    "minimax_m2": Family(
        (_NAME,),
        all_full,
        # Early configs have the model type of MiniMax-01.
        is_own=lambda config: _NAME in (config.get("architectures") or ()),
        qk_norm="full",
        has_partial_rotary=True,
        derived=rotary_size,
        defaults={"head_dim": 128, "rope_theta": 5e6},
        moe=MixtureOfExperts("intermediate_size", scoring="sigmoid", has_selection_bias=True),
    )
}

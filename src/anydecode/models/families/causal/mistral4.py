"""Mistral Small 4 (Mistral AI, 2026): latent attention whose queries grow with the position."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, mapping_value


def _whole_rotary_part(config: Config) -> dict[str, Any]:
    """The share of a head that rotates is given by its sizes too."""
    rope = mapping_value(config, "rope_parameters")
    rope.pop("partial_rotary_factor", None)
    return {"rope_parameters": rope}


FAMILIES = {
    "mistral4": family_like(
        "deepseek_v3",
        "Mistral4ForCausalLM",
        has_query_growth=True,
        derived=_whole_rotary_part,
        moe=MixtureOfExperts(shared_module="shared_experts"),
    )
}

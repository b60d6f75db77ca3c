"""Ouro (Zhu et al., 2025, arXiv:2510.25741): Llama with norms on both sides of each sublayer, whose
layers run several times in sequence."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import looped_layers
from anydecode.models.families.values import Config, int_value
from anydecode.models.limits import MAX_LAYERS


def _loops(config: Config) -> dict[str, Any]:
    """All runs of the layers; the final norm follows each."""
    loops = int_value(config, "total_ut_steps", 4, high=MAX_LAYERS)
    return looped_layers(config, loops, has_norms=True)


FAMILIES = {
    "ouro": family_like(
        "llama",
        "OuroForCausalLM",
        norms="both",
        derived=_loops,
        names={
            "post_attention_layernorm": "input_layernorm_2",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_attention_layernorm_2",
        },
    )
}

"""HyperCLOVA X SEED Think (NAVER Cloud, 2025, arXiv:2506.22403): Granite with a norm behind every
sublayer."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Scales
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import granite_scales
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import refusal


def _scales(config: Config) -> Scales:
    """Granite's, but logits are multiplied, and attention may have the usual factor."""
    scales = granite_scales(config)
    usual = config.get("attention_multiplier") is None
    return scales._replace(
        attention=None if usual else scales.attention, logits=1.0 / scales.logits
    )


def _checked(config: Config) -> dict[str, Any]:
    if not bool_value(config, "use_post_norm", True):
        raise refusal("use_post_norm", False, "true")
    return {}


FAMILIES = {
    "hyperclovax": family_like(
        "granite",
        "HyperCLOVAXForCausalLM",
        norms="both",
        scales=_scales,
        derived=_checked,
        names={
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
    )
}

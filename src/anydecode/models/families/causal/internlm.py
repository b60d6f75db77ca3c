"""InternLM (Shanghai AI Laboratory, 2023): Llama with biases in attention."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, mapping_value, value_or
from anydecode.models.limits import refusal


def _rope(config: Config) -> dict[str, Any]:
    """The rotary embedding, which published configs have in an object of their own, or not."""
    rotary = {"base": 10_000.0, "type": "dynamic", **mapping_value(config, "rotary")}
    kind, theta = rotary["type"], {"rope_theta": rotary["base"]}
    if kind == "origin":
        return theta
    if kind != "dynamic":
        raise refusal("rotary.type", kind, "dynamic or origin")
    factor = value_or(rotary, "scaling_factor", 1.0)
    return {**theta, "rope_scaling": {"rope_type": kind, "factor": factor}}


FAMILIES = {
    "internlm": family_like(
        "llama",
        "InternLMForCausalLM",
        derived=_rope,
        keys={"bias": ("attention_bias",)},
        defaults={"attention_bias": True},
    )
}

"""Spark 2.5 (iFLYTEK, 2026), dense: layers with windows, and gates of attention heads."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import refusal


def _check_gate(config: Config) -> dict[str, Any]:
    """Refuse other gates than those of the published models."""
    mode = config.get("gate_attn_act_mode")
    if mode not in (None, "sigmoid"):
        raise refusal("gate_attn_act_mode", mode, "'sigmoid'")
    if not bool_value(config, "headwise_attn_output_gate", True):
        raise refusal("headwise_attn_output_gate", False, "true")
    return {}


FAMILIES = {
    "spark2_5": Family(
        ("Spark2_5ForCausalLM",),
        all_full,
        attention_gate="sigmoid",
        gates_heads=True,
        has_partial_rotary=True,
        derived=_check_gate,
        names={"self_attn.qkv_proj": "self_attn.q_k_v_proj"},
        defaults={"hidden_act": "gelu"},
    )
}

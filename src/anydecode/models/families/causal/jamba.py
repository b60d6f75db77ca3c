"""Jamba (AI21, 2024, arXiv:2403.19887): Mamba with a few layers of attention, and experts in some
layers of either kind."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, no_rope
from anydecode.models.families.recurrent import JAMBA
from anydecode.models.families.values import Config, int_value, num_layers
from anydecode.models.limits import MAX_LAYERS


def _periodic(config: Config, kind: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is of `kind`: one in a period, from the offset on."""
    period = int_value(config, f"{kind}_layer_period", period, high=MAX_LAYERS)
    offset = int_value(config, f"{kind}_layer_offset", offset, low=0, high=period - 1)
    return [layer % period == offset for layer in range(num_layers(config))]


def _layer_types(config: Config) -> list[str]:
    return [FULL if is_attention else "mamba" for is_attention in _periodic(config, "attn", 8, 4)]


def _dense_layers(config: Config) -> dict[str, Any]:
    """The layers without experts, unless the config (of a GGUF file) lists them: all if there is
    one expert."""
    if config.get("mlp_only_layers") is not None:
        return {}
    has_experts = int_value(config, "num_experts", low=0) > 1
    are_expert_layers = _periodic(config, "expert", 2, 1)
    dense = [i for i, is_expert in enumerate(are_expert_layers) if not (has_experts and is_expert)]
    return {"mlp_only_layers": dense}


FAMILIES = {
    "jamba": Family(
        ("JambaForCausalLM",),
        _layer_types,
        derived=_dense_layers,
        recurrent=JAMBA,
        rope_layers=no_rope,
        moe=MixtureOfExperts("intermediate_size", is_normalised=False),
        keys={"mamba_dt_rank": ("time_step_rank",)},
        names={
            "norm": "final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        defaults={"num_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 8},
    )
}

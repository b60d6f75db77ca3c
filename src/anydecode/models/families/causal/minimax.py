"""MiniMax-Text-01 (MiniMax, 2025, arXiv:2501.08313) and MiniMax-M1 (arXiv:2506.13585): lightning
attention (Qin et al., arXiv:2401.04658) in all layers but a few, and experts."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL
from anydecode.models.families.recurrent import LIGHTNING
from anydecode.models.families.values import (
    Config,
    list_value,
    num_layers,
    rotary_size,
)
from anydecode.models.limits import refusal

_LINEAR = "linear_attention"


def _layer_types(config: Config) -> list[str]:
    """Full attention where `attn_type_list` has 1; without it in every second layer."""
    listed, count = list_value(config, "attn_type_list", int), num_layers(config)
    if listed is None:
        return [FULL if (layer + 1) % 2 else _LINEAR for layer in range(count)]
    return [FULL if is_full else _LINEAR for is_full in listed[:count]]


def _sizes(config: Config) -> dict[str, Any]:
    """Published configs have the rotary size of a head."""
    if config.get("shared_intermediate_size"):
        key = "shared_intermediate_size"
        raise refusal(key, config[key], "0: experts that all tokens share are not supported")
    if config.get("postnorm") is False:
        raise refusal("postnorm", False, "true")
    return rotary_size(config)


FAMILIES = {
    "minimax": Family(
        ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        _layer_types,
        model_types=("minimax_text_01", "minimax_m1"),
        norms="stream",
        has_partial_rotary=True,
        recurrent=LIGHTNING,
        derived=_sizes,
        keys={
            f"layernorm_{published}_{factor}": (f"{usual}_{factor}_factor",)
            for published, usual in (
                ("full_attention", "full_attn"),
                ("linear_attention", "linear_attn"),
                ("mlp", "mlp"),
            )
            for factor in ("alpha", "beta")
        },
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        moe=MixtureOfExperts("intermediate_size"),
    )
}

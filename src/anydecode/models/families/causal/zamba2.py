"""Zamba2 (Zyphra, 2024): Mamba-2, with one or two blocks of attention and an MLP that several
layers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.recurrent import HYBRID, MAMBA_2, RecurrentLayout
from anydecode.models.families.values import Config, bool_value, int_value, num_layers
from anydecode.models.limits import refusal
from anydecode.models.spec import RecurrentSpec


def _published_types(config: Config) -> list[str]:
    """The layers of Zamba2-2.7B, for configs without a list of them."""
    blocks = [*range(6, 43, 6), 47, 51]
    return [HYBRID if layer in blocks else "mamba" for layer in range(num_layers(config))]


def _attention_size(config: Config) -> dict[str, Any]:
    """The size of heads, which share the width of the hidden states beside the embeddings."""
    if bool_value(config, "use_long_context"):
        raise refusal("use_long_context", True, "false")
    hidden, heads = int_value(config, "hidden_size"), int_value(config, "num_attention_heads")
    own = {} if config.get("layer_types") else {"layer_types": _published_types(config)}
    inner = config.get("intermediate_size") or 4 * hidden
    return {"head_dim": 2 * hidden // heads, "intermediate_size": inner, **own}


def _mamba_spec(config: Config) -> RecurrentSpec:
    return replace(MAMBA_2.spec(config), norm_eps=1e-5)


def _scales(config: Config) -> Scales:
    return Scales(attention=(int_value(config, "head_dim") / 2) ** -0.5)


def _rope_if_used(config: Config, layer_types: list[str]) -> list[bool]:
    return [bool_value(config, "use_mem_rope")] * len(layer_types)


FAMILIES = {
    "zamba2": Family(
        ("Zamba2ForCausalLM",),
        _published_types,
        recurrent=RecurrentLayout(_mamba_spec, MAMBA_2.read),
        has_shared_blocks=True,
        rope_layers=_rope_if_used,
        scales=_scales,
        derived=_attention_size,
        keys={
            "layers_block_type": ("layer_types",),
            "n_mamba_heads": ("mamba_n_heads",),
            "mamba_headdim": ("mamba_d_head",),
            "mamba_ngroups": ("mamba_n_groups",),
            "add_bias_linear": ("mamba_proj_bias", "mlp_bias"),
        },
        names={"norm": "final_layernorm"},
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "mamba_d_state": 64,
            "tie_word_embeddings": True,
        },
    )
}

"""Bamba (IBM, 2024): Mamba-2 with a few layers of attention."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL
from anydecode.models.families.recurrent import MAMBA_2
from anydecode.models.families.values import Config, list_value, num_layers


def _listed_attention(config: Config) -> list[str]:
    """Attention in the layers that the config lists."""
    listed = list_value(config, "attn_layer_indices", int) or []
    return [FULL if layer in listed else "mamba" for layer in range(num_layers(config))]


FAMILIES = {
    "bamba": Family(
        ("BambaForCausalLM",),
        _listed_attention,
        recurrent=MAMBA_2,
        has_partial_rotary=True,
        names={
            "norm": "final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    )
}

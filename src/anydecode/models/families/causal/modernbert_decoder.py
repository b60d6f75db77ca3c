"""ModernBERT as a decoder: Ettin (Weller et al., 2025, arXiv:2507.11412)."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL, SLIDING, full_every_third
from anydecode.models.families.values import Config, bool_value, int_value, mapping_value, value_or
from anydecode.models.limits import refusal

#: The bases of rotary frequencies by the type of attention: their key in first configs, and the
#: default.
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
#: What its encoders (families/encoders.py) have, too.
MODERNBERT: dict[str, Any] = {
    "layer_types": full_every_third,
    "norm": "layer",
    "has_embedding_norm": True,
    "has_first_norm": False,
}
MODERNBERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
}


def _options(config: Config) -> dict[str, Any]:
    """The window, which is half of the one the key says, the heads of keys, and the bases of
    rotary frequencies."""
    if bool_value(config, "norm_bias"):
        raise refusal("norm_bias", True, "false")
    given = mapping_value(config, "rope_parameters")
    ropes = {
        kind: {"rope_theta": value_or(config, key, default), **mapping_value(given, kind)}
        for kind, (key, default) in _THETAS.items()
    }
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "sliding_window": int_value(config, "local_attention", 128, low=2) // 2,
        "rope_parameters": ropes,
    }


FAMILIES = {
    "modernbert-decoder": Family(
        ("ModernBertDecoderForCausalLM",),
        **MODERNBERT,
        has_head_transform=True,
        derived=_options,
        keys={"norm_eps": ("layer_norm_eps",)},
        names={
            "embed_tokens": "embeddings.tok_embeddings",
            "embed_norm": "embeddings.norm",
            "norm": "final_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "mlp_norm",
            **{f"self_attn.{part}_proj": f"attn.{part}_proj" for part in "qkv"},
            "self_attn.o_proj": "attn.Wo",
            "mlp.gate_up_proj": "mlp.Wi",
            "mlp.down_proj": "mlp.Wo",
        },
        defaults={
            **MODERNBERT_DEFAULTS,
            "classifier_activation": "gelu",
            "tie_word_embeddings": True,
        },
    )
}

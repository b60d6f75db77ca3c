"""OpenELM (Mehta et al., arXiv:2404.14619): later layers have more heads and larger MLPs."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value, int_value, num_layers
from anydecode.models.limits import MAX_COUNT, number, refusal


def _inner_size(config: Config, factor: Any) -> int:
    """The multiple of `ffn_dim_divisor` that is nearest to the size, or the next larger one if that
    is less than 90 % of it."""
    divisor = int_value(config, "ffn_dim_divisor", 256)
    size = number("ffn_multipliers", factor) * int_value(config, "hidden_size")
    rounded = max(divisor, int(size + divisor / 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * size else rounded + divisor


def _per_layer(config: Config, key: str) -> list[Any]:
    """The value of each layer, of which a config has a list."""
    values, count = config.get(key), num_layers(config)
    if not isinstance(values, list) or len(values) < count:
        raise refusal(key, values, f"a list of {count} numbers")
    return values[:count]


def _layers(config: Config) -> dict[str, Any]:
    """The sizes of each layer, and the largest ones. The config of a GGUF file has them."""
    if config.get("per_layer_config") is not None:
        return {}
    if not bool_value(config, "ffn_with_glu", True):
        raise refusal("ffn_with_glu", False, "true")
    names = ("num_query_heads", "num_kv_heads", "ffn_multipliers")
    sizes = [
        {
            "num_attention_heads": int_value({names[0]: heads}, names[0], high=MAX_COUNT),
            "num_key_value_heads": int_value({names[1]: kv_heads}, names[1], high=MAX_COUNT),
            "intermediate_size": _inner_size(config, factor),
        }
        for heads, kv_heads, factor in zip(*(_per_layer(config, x) for x in names), strict=True)
    ]
    largest = {key: max(own[key] for own in sizes) for key in sizes[0]}
    return {**largest, "per_layer_config": {str(i): own for i, own in enumerate(sizes)}}


FAMILIES = {
    "openelm": Family(
        ("OpenELMForCausalLM",),
        all_full,
        qk_norm="head",
        derived=_layers,
        keys={
            "model_dim": ("hidden_size",),
            "num_transformer_layers": ("num_hidden_layers",),
            "max_context_length": ("max_position_embeddings",),
            "rope_freq_constant": ("rope_theta",),
            "activation_fn_name": ("hidden_act",),
            "share_input_output_layers": ("tie_word_embeddings",),
            "normalize_qk_projections": ("use_qk_norm",),
        },
        names={
            "embed_tokens": "token_embeddings",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.qkv_proj": "attn.qkv_proj",
            "self_attn.o_proj": "attn.out_proj",
            "self_attn.q_norm": "attn.q_norm",
            "self_attn.k_norm": "attn.k_norm",
            "mlp.gate_up_proj": "ffn.proj_1",
            "mlp.down_proj": "ffn.proj_2",
        },
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    )
}

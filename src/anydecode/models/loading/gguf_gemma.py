"""The configs of Gemma 2 to 4 from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.limits import MAX_EXPERTS, MAX_STREAMS, refusal
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_rope import windows


def _gemma(keys: Keys, config: dict[str, Any], period: int, largest_num_layers: int) -> None:
    """The keys that Gemma 2 and 3 share. One layer in `period` has full attention. The largest
    model, identified by its number of layers, scales its queries by hidden_size / heads instead of
    the head's size."""
    layers = config["num_hidden_layers"]
    is_largest = layers == largest_num_layers
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if is_largest else config["head_dim"]
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = keys.count("attention.sliding_window", 4096)
    config["layer_types"] = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
    ]


def gemma2(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 2."""
    _gemma(keys, config, period=2, largest_num_layers=46)
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)


def gemma3(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 3."""
    # Some files list the attention type of each layer instead of the period, which is always 6.
    key = "attention.sliding_window_pattern"
    period = 6 if isinstance(keys.get(key, 6), list) else keys.count(key, 6)
    _gemma(keys, config, period=period, largest_num_layers=62)
    config["sliding_window_pattern"] = 6
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    config["attn_logit_softcapping"] = None
    # 0 means no softcap.
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None


def embedding_gemma(keys: Keys, config: dict[str, Any]) -> None:
    """EmbeddingGemma: files have the size of the whole window, as configs do."""
    gemma3(keys, config)
    config["use_bidirectional_attention"] = True


def gemma4(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 4."""
    windows(keys, config)
    _shared_layers(keys, config)
    types, theta = config["layer_types"], config.pop("rope_theta")
    scaling, full_dim = config.pop("rope_scaling") or {}, config["head_dim"]
    dim = config["head_dim"] = keys.count("attention.key_length_swa", full_dim)
    if keys.count("rope.dimension_count_swa", dim) != dim:
        raise CheckpointError(f"{keys.file.path}: heads that rotate in part are not supported")
    kv_heads = keys.counts("attention.head_count_kv", config["num_attention_heads"])
    inner = keys.counts("feed_forward_length")
    first_shared = len(types) - config["num_kv_shared_layers"]
    config |= {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", theta)},
            "full_attention": {**scaling, "rope_theta": theta},
        },
        "per_layer_config": {
            str(layer): {
                "head_dim": dim if kind == "sliding_attention" else full_dim,
                "num_key_value_heads": kv_heads[layer],
                "intermediate_size": inner[layer],
            }
            for layer, kind in enumerate(types)
        },
        "attention_k_eq_v": any(
            kind == "full_attention" and f"blk.{layer}.attn_v.weight" not in keys.file.tensors
            for layer, kind in enumerate(types[:first_shared])
        ),
        "enable_moe_block": bool(keys.get("expert_count", 0)),
    }
    config["num_experts"] = 0
    if config["enable_moe_block"]:
        config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
        config["top_k_experts"] = keys.count("expert_used_count")
        config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")


def gemma3n(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 3n."""
    windows(keys, config)
    _shared_layers(keys, config)
    file, layers = keys.file, config["num_hidden_layers"]
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0) or None
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    config["intermediate_size"] = keys.counts("feed_forward_length")
    config["per_layer_config"] = {
        str(layer): {"intermediate_size": size}
        for layer, size in enumerate(config["intermediate_size"])
    }
    config["intermediate_size"] = config["intermediate_size"][0]
    config["altup_num_inputs"] = keys.count("altup.num_inputs", 4, MAX_STREAMS, low=2)
    config["altup_active_idx"] = keys.count("altup.active_idx", 0, MAX_STREAMS, low=0)
    down = file.tensors.get("blk.0.laurel_l.weight")
    if down is None:
        raise CheckpointError(f"{file.path}: tensor 'blk.0.laurel_l.weight' is missing")
    config["laurel_rank"] = down.shape[0]
    scales = keys.get("activation_sparsity_scale")
    if not isinstance(scales, list) or len(scales) < layers:
        name = f"{file.path}: metadata gemma3n.activation_sparsity_scale"
        raise refusal(name, scales, f"a list of {layers} numbers")
    config["gate_cutoffs"] = [None if scale == -math.inf else scale for scale in scales[:layers]]


def _shared_layers(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 3n and 4: how many layers share keys and values, and the embeddings of each layer."""
    layers = config["num_hidden_layers"]
    config["num_kv_shared_layers"] = keys.count("attention.shared_kv_layers", 0, layers - 1, low=0)
    size = keys.count("embedding_length_per_layer_input", 0, low=0)
    config["hidden_size_per_layer_input"] = size
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    if size and table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    # 0 means no softcap.
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None

"""The configs of models with recurrent layers from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.limits import MAX_COUNT, MAX_EXPERTS, refusal
from anydecode.models.loading.gguf_dense import granite
from anydecode.models.loading.gguf_experts import derive
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_rope import partial_rotary, windows

#: RWKV: the epsilon of the norms of heads, which files do not store.
_RWKV_NORM_EPS = 64e-5
#: The ranks of the products of RWKV-7, and their keys in configs.
RANKS = {
    "decay_lora_rank": "decay_low_rank_dim",
    "iclr_lora_rank": "a_low_rank_dim",
    "value_residual_mix_lora_rank": "v_low_rank_dim",
    "gate_lora_rank": "gate_low_rank_dim",
}


def lfm2(keys: Keys, config: dict[str, Any]) -> None:
    """Layers without key heads are convolutions."""
    config["layer_types"] = ["full_attention" if count else "conv" for count in _kv_heads(keys)]
    config["conv_L_cache"] = keys.count("shortconv.l_cache")
    config["block_auto_adjust_ff_dim"] = False


def lfm2_moe(keys: Keys, config: dict[str, Any]) -> None:
    """LFM2 with experts in all layers but the first ones."""
    lfm2(keys, config)
    gating, sigmoid = keys.get("expert_gating_func"), 2
    if gating != sigmoid:
        raise refusal(keys.name("expert_gating_func"), gating, "2 (sigmoid)")
    _experts(keys, config)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["use_expert_bias"] = _has(keys, "exp_probs_b.bias")


def rwkv6(keys: Keys, config: dict[str, Any]) -> None:
    """RWKV-6."""
    config["head_dim"] = keys.count("wkv.head_size")
    config["hidden_act"] = "sqrelu"
    config["group_norm_eps"] = _RWKV_NORM_EPS
    config["halved_every"] = keys.count("rescale_every_n_layers", 0, low=0)
    config["mix_rank"] = keys.count("time_mix_extra_dim")
    config["decay_rank"] = keys.count("time_decay_extra_dim")


def rwkv6_qwen2(keys: Keys, config: dict[str, Any]) -> None:
    """RWKV-6 in Qwen2, whose files may lack the number of key heads where all heads have keys."""
    config["head_dim"] = keys.count("wkv.head_size")
    heads = config["hidden_size"] // config["head_dim"]
    config["num_key_value_heads"] = keys.count("attention.head_count_kv", 0, low=0) or heads
    config["mix_rank"] = keys.count("time_mix_extra_dim")
    config["decay_rank"] = keys.count("time_decay_extra_dim")


def rwkv7(keys: Keys, config: dict[str, Any]) -> None:
    """RWKV-7 with channel mixing."""
    if keys.count("token_shift_count", 2) != 2:
        raise CheckpointError(f"{keys.file.path}: RWKV-7 without channel mixing is not supported")
    config["hidden_act"] = "sqrelu"
    _time_mix(keys, config)


def arwkv7(keys: Keys, config: dict[str, Any]) -> None:
    """ARWKV: whether there are gates and norms of heads is what the file has tensors for."""
    _time_mix(keys, config)
    config["has_gate"] = _has(keys, "time_mix_g1.weight")
    config["has_head_norms"] = _has(keys, "time_mix_ln.weight")


def _time_mix(keys: Keys, config: dict[str, Any]) -> None:
    """The time mixing of RWKV-7."""
    config["head_dim"] = keys.count("wkv.head_size")
    config["intermediate_size"] = keys.count("feed_forward_length")
    config["group_norm_eps"] = _RWKV_NORM_EPS
    for key, name in RANKS.items():
        is_optional = "gate" in key and keys.architecture == "arwkv7"
        config[name] = keys.count(f"attention.{key}", low=0 if is_optional else 1)


def mamba(keys: Keys, config: dict[str, Any]) -> None:
    """Mamba, and Falcon-Mamba, which has norms of the gates."""
    if _flag(keys, "ssm.dt_b_c_rms"):
        config["model_type"], config["architectures"] = "falcon_mamba", ["FalconMambaForCausalLM"]
    config["intermediate_size"] = keys.count("ssm.inner_size")
    for key, name in (
        ("ssm.state_size", "state_size"),
        ("ssm.conv_kernel", "conv_kernel"),
        ("ssm.time_step_rank", "time_step_rank"),
    ):
        config[name] = keys.count(key)
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in keys.file.tensors
    config["use_bias"] = "blk.0.ssm_in.bias" in keys.file.tensors


def jamba(keys: Keys, config: dict[str, Any]) -> None:
    """Jamba: layers without key heads are recurrent, those with a router have experts."""
    hidden, inner = config["hidden_size"], keys.count("ssm.inner_size")
    if inner % hidden:
        allowed = f"a multiple of embedding_length, {hidden}"
        raise refusal(keys.name("ssm.inner_size"), inner, allowed)
    tensors = keys.file.tensors
    config |= {
        "layer_types": ["full_attention" if heads else "mamba" for heads in _kv_heads(keys)],
        "mamba_expand": inner // hidden,
        "mamba_d_state": keys.count("ssm.state_size", high=MAX_COUNT),
        "mamba_d_conv": keys.count("ssm.conv_kernel", high=MAX_COUNT),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "mamba_conv_bias": _has(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(keys, "ssm_in.bias"),
        "num_experts": keys.count("expert_count", 0, high=MAX_EXPERTS, low=0),
        "num_experts_per_tok": keys.count("expert_used_count", 1),
        "mlp_only_layers": [
            layer
            for layer in range(config["num_hidden_layers"])
            if f"blk.{layer}.ffn_gate_inp.weight" not in tensors
        ],
    }


def plamo2(keys: Keys, config: dict[str, Any]) -> None:
    """PLaMo 2: layers without key heads are recurrent."""
    heads = keys.count("ssm.time_step_rank", high=MAX_COUNT)
    inner, dim = keys.count("ssm.inner_size"), config["head_dim"]
    if inner != heads * dim:
        raise refusal(keys.name("ssm.inner_size"), inner, f"{heads} heads of {dim}")
    config |= {
        "layer_types": ["full_attention" if count else "mamba" for count in _kv_heads(keys)],
        "mamba_num_heads": heads,
        "mamba_d_state": keys.count("ssm.state_size", high=MAX_COUNT),
        "mamba_d_conv": keys.count("ssm.conv_kernel", high=MAX_COUNT),
    }


def mamba_2(keys: Keys, config: dict[str, Any]) -> None:
    """The sizes of Mamba-2, alone and in hybrids."""
    inner, heads = keys.count("ssm.inner_size"), _heads(keys)
    config |= {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.count("ssm.group_count", high=MAX_COUNT),
        "mamba_d_state": keys.count("ssm.state_size", high=MAX_COUNT),
        "mamba_d_conv": keys.count("ssm.conv_kernel", high=MAX_COUNT),
        "mamba_conv_bias": _has(keys, "ssm_conv1d.bias"),
    }
    if config["model_type"] == "mamba2":
        config["head_dim"] = inner // heads


def granite_hybrid(keys: Keys, config: dict[str, Any]) -> None:
    """Granite 4: layers without key heads are recurrent."""
    granite_moe(keys, config)
    mamba_2(keys, config)
    config["layer_types"] = ["full_attention" if count else "mamba" for count in _kv_heads(keys)]
    has_rope = _flag(keys, "rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if has_rope else "nope"
    if has_rope and keys.count("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise CheckpointError(f"{keys.file.path}: heads that rotate in part are not supported")


def granite_moe(keys: Keys, config: dict[str, Any]) -> None:
    """The experts of Granite, and the MLP that every token runs through."""
    granite(keys, config)
    config["num_local_experts"] = keys.count("expert_count", 0, high=MAX_EXPERTS, low=0)
    config["num_experts_per_tok"] = 0
    if config["num_local_experts"]:
        config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = config["intermediate_size"]
    shared = keys.count("expert_shared_feed_forward_length", 0, low=0)
    config["shared_intermediate_size"] = shared


def granite_swa(keys: Keys, config: dict[str, Any]) -> None:
    """Granite with windows: the layers with rotary position embeddings, and experts."""
    granite_moe(keys, config)
    windows(keys, config)
    count = config["num_hidden_layers"]
    flags = keys.get("attention.rope_pattern", [True] * count)
    if not isinstance(flags, list) or len(flags) < count:
        raise refusal(keys.name("attention.rope_pattern"), flags, f"a list of {count} flags")
    config["layer_rope_theta"] = [config["rope_theta"] if flag else 0.0 for flag in flags[:count]]
    if config["num_local_experts"]:
        config["model_type"] = "granitemoe_swa"
        config["architectures"] = ["GraniteMoeSWAForCausalLM"]


def falcon_h1(keys: Keys, config: dict[str, Any]) -> None:
    """Falcon-H1, whose factors are part of the weights."""
    mamba_2(keys, config)
    config["mamba_rms_norm"] = _has(keys, "ssm_norm.weight")
    config["mamba_norm_before_gate"] = False


def nemotron_h(keys: Keys, config: dict[str, Any]) -> None:
    """Nemotron-H: layers are an MLP or experts, attention, or with the sizes of neither,
    recurrent."""
    mamba_2(keys, config)
    inner = keys.counts("feed_forward_length", low=0)
    has_experts = keys.architecture == "nemotron_h_moe"
    mlp = "moe" if has_experts else "mlp"
    # The count of blocks includes one that predicts further tokens.
    count = config["num_hidden_layers"]
    num_unused = keys.count("nextn_predict_layers", 0, count - 1, low=0)
    types = [
        mlp if size else "full_attention" if heads else "linear_attention"
        for size, heads in zip(inner, _kv_heads(keys), strict=True)
    ][: count - num_unused]
    config |= {
        "hidden_act": "relu2",
        "num_hidden_layers": count - num_unused,
        "num_nextn_predict_layers": num_unused,
        "layer_types": types,
        "mlp_only_layers": [layer for layer, kind in enumerate(types) if kind != "moe"],
    }
    if not has_experts:
        return
    _experts(keys, config)
    config["norm_topk_prob"] = _flag(keys, "expert_weights_norm")
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["n_group"] = keys.count("expert_group_count", 1)
    config["topk_group"] = keys.count("expert_group_used_count", 1)
    shared = keys.count("expert_shared_feed_forward_length", 0, low=0)
    config["moe_shared_expert_intermediate_size"] = shared
    if keys.get("moe_latent_size", None) is not None:
        config["moe_latent_size"] = keys.count("moe_latent_size")


def gated_delta(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen3-Next and Qwen3.5: one layer in some has attention, the others the gated delta rule."""
    heads, count = _heads(keys), config["num_hidden_layers"]
    # The count of blocks includes those that predict further tokens.
    num_unused = keys.count("nextn_predict_layers", 0, count - 1, low=0)
    config |= {
        "num_hidden_layers": count - num_unused,
        "num_nextn_predict_layers": num_unused,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": keys.count("ssm.group_count", high=MAX_COUNT),
        "linear_value_head_dim": keys.count("ssm.inner_size") // heads,
        "linear_key_head_dim": keys.count("ssm.state_size", high=MAX_COUNT),
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel", high=MAX_COUNT),
        "has_fused_inputs": _has(keys, "ssm_in.weight"),
        "has_separate_gates": keys.architecture != "qwen3next",
        # Value heads are stored in the order in which ggml repeats key heads.
        "has_tiled_keys": keys.architecture != "qwen3next",
        "layer_types": _delta_layers(keys, count - num_unused) + ["full_attention"] * num_unused,
    }
    partial_rotary(keys, config)
    if keys.architecture == "qwen35":
        return
    _experts(keys, config)
    shared = keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    config["shared_expert_intermediate_size"] = shared


def qwen4_exp(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen3.8. Blocks of positions are as large in all layers."""
    gated_delta(keys, config)
    sizes = {size for size in keys.counts("attention.compress_ratios", low=0) if size}
    if len(sizes) != 1:
        raise refusal(keys.name("attention.compress_ratios"), sorted(sizes), "one size")
    config |= {
        "output_gate_type": "sigmoid",
        "hc_count": keys.count("hyper_connection.count"),
        "hc_lowrank": keys.count("hyper_connection.low_rank"),
        "indexer_n_heads": keys.count("attention.indexer.head_count"),
        "indexer_head_dim": keys.count("attention.indexer.key_length"),
        "indexer_budget": keys.count("attention.indexer.top_k"),
        "indexer_compress_ratio": sizes.pop(),
    }
    layers = keys.get("ple.layers", [])
    if layers:
        order, heads = keys.count("ple.ngram_size", low=2), keys.count("ple.heads_per_ngram")
        size = keys.count("embedding_length_per_layer_input")
        config |= {
            "ple_layer_ids": [layer + 1 for layer in layers],
            "ngram_size": order,
            "heads_per_ngram": heads,
            "ple_conv_kernel_size": keys.count("ple.conv_kernel"),
            "ple_eos_token_id": keys.count("ple.eos_token_id", low=0),
            "ple_embed_dim": (order - 1) * heads * size,
            "layer_multipliers": keys.get("ple.layer_multipliers"),
            "ngram_heads_vocab_sizes": keys.get("ple.head_vocab_sizes"),
            "ngram_heads_offsets": keys.get("ple.head_offsets"),
        }
    derive(config)


def _delta_layers(keys: Keys, count: int) -> list[str]:
    """The types of layers, from flags, or from the period of full attention."""
    flags = keys.get("attention.recurrent_layers", None)
    if flags is None:
        period = keys.count("full_attention_interval", 4)
        flags = [(layer + 1) % period != 0 for layer in range(count)]
    if not isinstance(flags, list) or len(flags) < count:
        raise refusal(keys.name("attention.recurrent_layers"), flags, f"a list of {count} flags")
    return ["linear_attention" if flag else "full_attention" for flag in flags[:count]]


def _experts(keys: Keys, config: dict[str, Any]) -> None:
    config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["norm_topk_prob"] = True


def _kv_heads(keys: Keys) -> list[int]:
    """The number of key heads of each layer, from a list."""
    key, count = "attention.head_count_kv", keys.count("block_count")
    if not isinstance(keys.get(key), list):
        raise refusal(keys.name(key), keys.get(key), f"a list of {count} integers")
    return keys.counts(key, low=0)


def _heads(keys: Keys) -> int:
    """The number of heads of a recurrence."""
    inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank", high=MAX_COUNT)
    if inner % heads:
        allowed = f"a divisor of the inner size, {inner}"
        raise refusal(keys.name("ssm.time_step_rank"), heads, allowed)
    return heads


def _flag(keys: Keys, key: str, default: bool = False) -> bool:
    value = keys.get(key, default)
    if not isinstance(value, bool):
        raise refusal(keys.name(key), value, "true or false")
    return value


def _has(keys: Keys, tensor: str) -> bool:
    """Whether some layer has a tensor of this name."""
    return any(name.endswith(f".{tensor}") for name in keys.file.tensors)

"""The configs of mixtures of experts from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import rotary_share
from anydecode.models.limits import MAX_EXPERTS, MAX_FACTOR, number, refusal
from anydecode.models.loading.gguf_dense import phi3
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_rope import longrope, partial_rotary, windows

#: The values of `expert_gating_func`; 0 is none.
SOFTMAX, SIGMOID, _SQRT_SOFTPLUS = 1, 2, 4
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_KV_HEADS, _DIVISORS = "num_key_value_heads", ("short_factor", "long_factor")
#: DeepSeek: the number of experts and whether their scores are sigmoids -> the number of groups and
#: that of those chosen, which files of 2024 and early 2025 do not store. V2 has 160, V3 256.
_DEEPSEEK_GROUPS = {(160, False): (8, 3), (256, True): (8, 4)}


def llama4(keys: Keys, config: dict[str, Any]) -> None:
    """Llama 4."""
    if keys.get("attention.sliding_window", 1) == 0:
        raise CheckpointError(f"{keys.file.path}: llama4 without chunked attention is unsupported")
    count = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_local_experts"] = count
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["decoder_sparse_step"] = keys.count("interleave_moe_layer_step")
    # The file does not store these: every fourth layer has no position embedding and full
    # attention, and Maverick, the model with 128 experts, has no norms of queries and keys.
    config["no_rope_layer_interval"] = 4
    config["attention_chunk_size"] = config["floor_scale"] = 8192
    config["attn_scale"] = 0.1
    config["use_qk_norm"] = count != 128


def experts(keys: Keys, config: dict[str, Any]) -> None:
    """The number of experts, and of those chosen."""
    config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")


def olmoe(keys: Keys, config: dict[str, Any]) -> None:
    """OLMoE."""
    experts(keys, config)
    config["norm_topk_prob"] = False


def qwen2_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen2-MoE."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = keys.count("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = False
    config["use_sliding_window"] = False
    config["qkv_bias"] = "blk.0.attn_q.bias" in keys.file.tensors


def _require_sigmoid(keys: Keys) -> None:
    if keys.get("expert_gating_func", SIGMOID) != SIGMOID:
        name = keys.architecture
        raise CheckpointError(f"{keys.file.path}: experts of {name} without sigmoid scores")


def dots1(keys: Keys, config: dict[str, Any]) -> None:
    """dots.llm1."""
    _require_sigmoid(keys)
    experts_beside_shared(keys, config)
    config["use_sliding_window"] = False


def afmoe(keys: Keys, config: dict[str, Any]) -> None:
    """AFMoE."""
    _require_sigmoid(keys)
    experts_beside_shared(keys, config)
    windows(keys, config)
    config["mup_enabled"] = True  # as published; the file does not store it


def minimax_01(keys: Keys, config: dict[str, Any]) -> None:
    """MiniMax-Text-01 and MiniMax-M1. One factor is that of all inputs in their sums with outputs,
    which have none. Layers with a second norm are recurrent."""
    experts(keys, config)
    partial_rotary(keys, config)
    factor = keys.number("residual_scale")
    parts = ("full_attn", "linear_attn", "mlp")
    config |= {f"{part}_alpha_factor": factor for part in parts}
    config |= {f"{part}_beta_factor": 1.0 for part in parts}
    config["layer_types"] = [
        _LINEAR if f"blk.{layer}.attn_norm_2.weight" in keys.file.tensors else _FULL
        for layer in range(config["num_hidden_layers"])
    ]


def minimax_m2(keys: Keys, config: dict[str, Any]) -> None:
    """MiniMax-M2."""
    _require_sigmoid(keys)
    experts(keys, config)
    config["intermediate_size"] = keys.count("expert_feed_forward_length")
    partial_rotary(keys, config)


def hunyuan_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Hunyuan-A13B."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", 1, high=MAX_EXPERTS, low=0)


def glm4_moe(keys: Keys, config: dict[str, Any]) -> None:
    """GLM-4.5 to 4.7."""
    _require_sigmoid(keys)
    _further_layers(keys, config)
    experts_beside_shared(keys, config)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in keys.file.tensors
    partial_rotary(keys, config)


def bailing_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Ling and Ring 2.0: GLM-4.5 with groups of experts."""
    glm4_moe(keys, config)
    _groups(keys, config)


def exaone_moe(keys: Keys, config: dict[str, Any]) -> None:
    """K-EXAONE."""
    _require_sigmoid(keys)
    _further_layers(keys, config)
    experts_beside_shared(keys, config)
    _groups(keys, config)
    windows(keys, config)


def hy_v3(keys: Keys, config: dict[str, Any]) -> None:
    """Hy3."""
    _require_sigmoid(keys)
    _further_layers(keys, config)
    experts(keys, config)
    inner = keys.count("expert_feed_forward_length")
    shared = keys.count("expert_shared_feed_forward_length", inner, low=0)
    config["moe_intermediate_size"] = inner
    config["n_shared_experts"] = shared // inner
    config["mlp_only_layers"] = _dense_layers(keys, config)
    config["first_k_dense_replace"] = 0
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.get("expert_weights_norm", False)


def hy_v4(keys: Keys, config: dict[str, Any]) -> None:
    """Hy4: DeepSeek-V3.2 with hyper-connections that mix no streams."""
    sparse_deepseek(keys, config)
    limited = keys.get("swiglu_clamp_exp", None) is not None
    config |= {
        "swiglu_limit": _one_limit(keys) if limited else 0.0,
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_eps": keys.number("hyper_connection.epsilon"),
        "hc_magnitude": keys.number("hyper_connection.magnitude"),
    }
    derive(config)


def mellum(keys: Keys, config: dict[str, Any]) -> None:
    """Mellum 2: the scaling of rotary frequencies is that of layers with full attention."""
    qwen3_moe(keys, config)
    if keys.get("attention.sliding_window", None) is None:
        return
    windows(keys, config)
    theta, scaling = config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {
        "full_attention": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", theta),
        },
    }


def mimo2(keys: Keys, config: dict[str, Any]) -> None:
    """MiMo-V2-Flash and MiMo-V2.5, which has fused matrices."""
    _further_layers(keys, config)
    experts(keys, config)
    windows(keys, config)
    partial_rotary(keys, config)
    types, share = config["layer_types"], config["partial_rotary_factor"]
    config |= {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "mlp_only_layers": _dense_layers(keys, config),
        "has_fused_qkv": "blk.0.attn_qkv.weight" in keys.file.tensors,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "attention_value_scale": keys.number("attention.value_scale", 1.0),
        "rope_parameters": {
            "full_attention": {
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": share,
            },
            "sliding_attention": {
                "rope_theta": keys.number("rope.freq_base_swa", config["rope_theta"]),
                "partial_rotary_factor": share,
            },
        },
    }
    for kind, heads, sinks in (
        ("full_attention", "num_key_value_heads", "add_full_attention_sink_bias"),
        ("sliding_attention", "swa_num_key_value_heads", "add_swa_attention_sink_bias"),
    ):
        number = _number_of_type(keys, "attention.head_count_kv", types, kind)
        if number is not None:
            config[heads] = number
            first = types.index(kind)
            config[sinks] = f"blk.{first}.attn_sinks.weight" in keys.file.tensors
    derive(config)


def _number_of_type(keys: Keys, key: str, types: list[str], kind: str) -> int | None:
    """The number that all layers of type `kind` have; None if there are none of this type."""
    numbers = keys.counts(key)
    found = {numbers[layer] for layer, one in enumerate(types) if one == kind}
    if len(found) > 1:
        raise refusal(keys.name(key), numbers, f"one number in all layers of type {kind}")
    return next(iter(found), None)


def _dense_layers(keys: Keys, config: dict[str, Any]) -> list[int]:
    """The layers without a router."""
    tensors, count = keys.file.tensors, config["num_hidden_layers"]
    return [layer for layer in range(count) if f"blk.{layer}.ffn_gate_inp.weight" not in tensors]


def kimi_linear(keys: Keys, config: dict[str, Any]) -> None:
    """Kimi Linear: layers without key heads are recurrent."""
    _require_sigmoid(keys)
    dim = keys.count("kda.head_dim")
    kv_heads = keys.counts("attention.head_count_kv", low=0)
    types = ["full_attention" if heads else "linear_attention" for heads in kv_heads]
    config |= {
        "layer_types": types,
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": dim,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
    }
    _latent(keys, config, first=types.index("full_attention") if "full_attention" in types else 0)
    experts_beside_shared(keys, config)
    _groups(keys, config)


def kimi_k3(keys: Keys, config: dict[str, Any]) -> None:
    """Kimi K3: Kimi Linear with sums of blocks of layers, and gates and projections, which a file
    has by its tensors. A limit of the MLPs' inputs that is not above 0 is none."""
    kimi_linear(keys, config)
    tensors, key = keys.file.tensors, "activation.situ_linear_beta"
    limit = number(keys.name(key), keys.get(key), -MAX_FACTOR)
    config |= {
        "hidden_act": "situ",
        "activation_situ_beta": keys.number("activation.situ_beta"),
        "activation_situ_linear_beta": limit if limit > 0 else None,
        "attn_res_block_size": keys.count("attn_res.block_size"),
        "kda_lower_bound": keys.get("kda.gate_lower_bound", None),
        "mla_use_output_gate": any(name.endswith(".attn_gate.weight") for name in tensors),
        "latent_moe_use_norm": any(name.endswith(".ffn_routed_norm.weight") for name in tensors),
    }
    if keys.get("expert_latent_length", None) is not None:
        config["moe_latent_size"] = keys.count("expert_latent_length")
    derive(config)


def bailing_hybrid(keys: Keys, config: dict[str, Any]) -> None:
    """Ling 3: Kimi Linear with a limit of the decay."""
    _further_layers(keys, config)
    kimi_linear(keys, config)
    config["kda_safe_gate"] = keys.get("kda.safe_gate", True)
    config["kda_lower_bound"] = keys.number("kda.gate_lower_bound")


def laguna(keys: Keys, config: dict[str, Any]) -> None:
    """Laguna. Without a pattern, every fourth layer, from the first on, has no window."""
    _require_sigmoid(keys)
    experts(keys, config)
    count, heads = config["num_hidden_layers"], keys.counts("attention.head_count")
    config["layer_types"] = [_FULL] * count
    if keys.get("attention.sliding_window", 0):
        config["sliding_window"] = keys.count("attention.sliding_window")
        config["layer_types"] = [_SLIDING if layer % 4 else _FULL for layer in range(count)]
        if keys.get("attention.sliding_window_pattern", None) is not None:
            windows(keys, config)
    gate = keys.file.tensors.get("blk.0.attn_gate.weight")
    dense = keys.count("leading_dense_block_count", low=0)
    config |= {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale"),
        "num_attention_heads_per_layer": heads,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(count)],
        "gating": gate is None or gate.shape[0] == heads[0] or "per-element",
        "rope_parameters": _own_ropes(keys, config),
    }
    derive(config)


def step35(keys: Keys, config: dict[str, Any]) -> None:
    """Step-3.5. Layers with full attention rotate half of the numbers that the file names."""
    _require_sigmoid(keys)
    _further_layers(keys, config)
    experts(keys, config)
    windows(keys, config)
    count, other = config["num_hidden_layers"], dict[str, Any]()
    for kind, found in ((_FULL, config), (_SLIDING, other)):
        for key, name in (("head_count", "num_attention_heads"), ("head_count_kv", _KV_HEADS)):
            number = _number_of_type(keys, f"attention.{key}", config["layer_types"], kind)
            if number is not None:
                found[name] = number
    if _KV_HEADS in other:
        other["num_attention_groups"] = other.pop(_KV_HEADS)
    config |= {
        "attention_other_setting": other,
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "share_expert_dim": keys.count("expert_shared_feed_forward_length", low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", True),
        "moe_layers_enum": [x for x in range(count) if x not in _dense_layers(keys, config)],
        "swiglu_limits": keys.get("swiglu_clamp_exp", None),
        "swiglu_limits_shared": keys.get("swiglu_clamp_shexp", None),
        "rope_parameters": _own_ropes(keys, config, full_share=0.5),
    }
    derive(config)


def cohere2_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Cohere 2 with experts, whose layer norms are RMS norms if the file has an epsilon for those.
    The average of both kinds of experts is the only one that files have."""
    _further_layers(keys, config)
    experts_beside_shared(keys, config)
    windows(keys, config)
    if "rms_norm_eps" in config:
        config["model_type"] = "cohere2_moe_rms"
    dense, is_sigmoid = config["intermediate_size"], True
    if keys.get("expert_gating_func", SIGMOID) != SIGMOID:
        is_sigmoid = False
    config |= {
        "logit_scale": keys.number("logit_scale"),
        "intermediate_size": config["moe_intermediate_size"],
        "prefix_dense_intermediate_size": dense,
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "norm_topk_prob": keys.get("expert_weights_norm", False),
    }
    derive(config)


def smallthinker(keys: Keys, config: dict[str, Any]) -> None:
    """SmallThinker. With windows, the first of every four layers has none, and no positions."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    is_softmax = keys.get("expert_gating_func", SOFTMAX) == SOFTMAX
    config["moe_primary_router_apply_softmax"] = is_softmax
    has_windows = keys.get("attention.sliding_window", 0) != 0
    if has_windows:
        config["sliding_window"] = keys.count("attention.sliding_window")
    layers = range(config["num_hidden_layers"])
    config["sliding_window_layout"] = [int(has_windows and i % 4 != 0) for i in layers]
    config["rope_layout"] = [int(not has_windows or i % 4 != 0) for i in layers]


def maple(keys: Keys, config: dict[str, Any]) -> None:
    """Maple: one limit for all layers."""
    experts(keys, config)
    windows(keys, config)
    partial_rotary(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["rope_theta"] = keys.number("rope.freq_base_swa", config["rope_theta"])
    config["nope_on_global_attention"] = True
    config["swiglu_limit"] = _one_limit(keys)


def minimax_m3(keys: Keys, config: dict[str, Any]) -> None:
    """MiniMax-M3."""
    _require_sigmoid(keys)
    experts_beside_shared(keys, config)
    partial_rotary(keys, config)
    size = keys.count("attention.indexer.block_size", 128)
    config |= {
        "shared_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "index_n_heads": keys.count("attention.indexer.head_count", 4),
        "index_head_dim": keys.count("attention.indexer.key_length", 128),
        "index_block_size": size,
        "index_topk_blocks": keys.count("attention.indexer.top_k", 16),
        "index_local_blocks": keys.count("attention.indexer.local_blocks", 1, low=0),
        "indexer_types": _indexer_types(keys, config, "indexer.q_proj", "none"),
    }
    derive(config)


def _own_ropes(keys: Keys, config: dict[str, Any], full_share: float = 1.0) -> dict[str, Any]:
    """The rotary embeddings of layers without and with a window, of which only the first have a
    scaling, and rotate `full_share` of the numbers that the file has for them."""
    head, theta, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"] or {}
    full = int(keys.count("rope.dimension_count", head) * full_share)
    sliding = keys.count("rope.dimension_count_swa", head)
    # The divisors of frequencies may be as many as layers with a window have.
    divisors = {key: scaling[key][: full // 2] for key in scaling if key in _DIVISORS}
    return {
        _FULL: {
            **scaling,
            **divisors,
            "rope_theta": theta,
            "partial_rotary_factor": rotary_share(full, head),
        },
        _SLIDING: {
            "rope_theta": keys.number("rope.freq_base_swa", theta),
            "partial_rotary_factor": rotary_share(sliding, head),
        },
    }


def derive(config: dict[str, Any]) -> None:
    """Add what the family computes from the keys of a config."""
    family = FAMILIES[config["model_type"]]
    assert family.derived is not None
    merged = {**family.defaults, **config}
    config |= {**merged, **family.derived(merged)}


def phimoe(keys: Keys, config: dict[str, Any]) -> None:
    """Phi-3.5-MoE."""
    config["num_local_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    phi3(keys, config)


def _further_layers(keys: Keys, config: dict[str, Any]) -> None:
    """The layers that predict further tokens, which the count of blocks includes."""
    num_unused = keys.count("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, low=0)
    config["num_hidden_layers"] -= num_unused
    config["num_nextn_predict_layers"] = num_unused


def _groups(keys: Keys, config: dict[str, Any]) -> None:
    """The number of groups of experts, and of those that experts are chosen from."""
    config["n_group"] = keys.count("expert_group_count", 1)
    config["topk_group"] = keys.count("expert_group_used_count", 1)


def experts_beside_shared(keys: Keys, config: dict[str, Any]) -> None:
    """Experts beside shared ones, behind the first layers."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", high=MAX_EXPERTS, low=0)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.get("expert_weights_norm", True)


def dbrx(keys: Keys, config: dict[str, Any]) -> None:
    """DBRX: a limit of 0 is none."""
    experts(keys, config)
    config["clip_qkv"] = keys.number("attention.clamp_kqv", 0.0) or None


def deepseek_moe(keys: Keys, config: dict[str, Any]) -> None:
    """DeepSeekMoE."""
    experts_beside_shared(keys, config)
    config["norm_topk_prob"] = False


def deepseek(keys: Keys, config: dict[str, Any]) -> None:
    """DeepSeek-V2, and V3 if the scores of experts are sigmoids."""
    file = keys.file
    _latent(keys, config)
    gating = keys.get("expert_gating_func", 0)
    if gating not in (0, SOFTMAX, SIGMOID):
        raise refusal(f"{file.path}: metadata deepseek2.expert_gating_func", gating, "1 or 2")
    # Only V3 has selection biases; its first files lack the key.
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    _deepseek_experts(keys, config, gating == SIGMOID or (not gating and has_bias))


def sparse_deepseek(keys: Keys, config: dict[str, Any]) -> None:
    """DeepSeek-V3.2 and GLM-5."""
    _require_sigmoid(keys)
    _latent(keys, config)
    _deepseek_experts(keys, config, is_sigmoid=True)
    _indexer(keys, config)


def _indexer(keys: Keys, config: dict[str, Any]) -> None:
    """Indexers whose heads have weights; other layers attend to what an earlier one selects."""
    config["index_topk"] = keys.count("attention.indexer.top_k")
    config["index_n_heads"] = keys.count("attention.indexer.head_count")
    config["index_head_dim"] = keys.count("attention.indexer.key_length")
    config["indexer_types"] = _indexer_types(keys, config, "indexer.attn_k", "shared")


def glm5_next(keys: Keys, config: dict[str, Any]) -> None:
    """GLM-5.3: Kimi Linear with an indexer of blocks and hyper-connections."""
    _further_layers(keys, config)
    kimi_linear(keys, config)
    _indexer(keys, config)
    config |= {
        "index_block_size": keys.count("attention.indexer.kpool"),
        "index_kpool_always_select_tail": keys.get("attention.indexer.kpool_select_tail", True),
        "linear_lower_bound": keys.get("kda.gate_lower_bound", None),
        "swiglu_limit": _one_limit(keys),
        **_hyper_connections(keys),
    }
    derive(config)


def _hyper_connections(keys: Keys) -> dict[str, Any]:
    return {
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.number("hyper_connection.epsilon"),
    }


def _one_limit(keys: Keys) -> float:
    """The limit of the activation, which is that of all layers."""
    limits = keys.get("swiglu_clamp_exp")
    limit = limits[0] if isinstance(limits, list) and limits else limits
    if isinstance(limits, list) and any(other != limit for other in limits):
        raise refusal(keys.name("swiglu_clamp_exp"), limits, "one limit for all layers")
    return number(keys.name("swiglu_clamp_exp"), limit)


def deepseek_v4(keys: Keys, config: dict[str, Any]) -> None:
    """DeepSeek-V4. Old files count layers that predict further tokens and have none."""
    gating = keys.get("expert_gating_func", _SQRT_SOFTPLUS)
    if gating != _SQRT_SOFTPLUS:
        raise refusal(keys.name("expert_gating_func"), gating, f"{_SQRT_SOFTPLUS}")
    if any(".nextn.eh_proj." in name for name in keys.file.tensors):
        _further_layers(keys, config)
    experts(keys, config)
    count = config["num_hidden_layers"]
    config |= {
        "swiglu_limit": _one_limit(keys),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count", high=MAX_EXPERTS, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", True),
        "num_hash_layers": keys.count("hash_layer_count", 0, low=0),
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "o_lora_rank": keys.count("attention.output_lora_rank"),
        "o_groups": keys.count("attention.output_group_count"),
        "sliding_window": keys.count("attention.sliding_window"),
        "compress_ratios": keys.counts("attention.compress_ratios", low=0)[:count],
        "compress_rope_theta": keys.number("attention.compress_rope_freq_base"),
        "qk_rope_head_dim": keys.count("rope.dimension_count"),
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
        **_hyper_connections(keys),
    }
    derive(config)


def _indexer_types(keys: Keys, config: dict[str, Any], part: str, other: str) -> list[str]:
    """ "full" for each layer with the tensor `part` of an indexer, `other` for those without."""
    return [
        "full" if f"blk.{layer}.{part}.weight" in keys.file.tensors else other
        for layer in range(config["num_hidden_layers"])
    ]


def mistral4(keys: Keys, config: dict[str, Any]) -> None:
    """Mistral Small 4."""
    _latent(keys, config)
    _deepseek_experts(keys, config, is_sigmoid=False)
    config.pop("topk_method", None)
    if keys.get("attention.temperature_scale", None) is not None:
        scaling = config["rope_scaling"] or {"rope_type": "default"}
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
        config["rope_scaling"] = scaling


def grok(keys: Keys, config: dict[str, Any]) -> None:
    """Grok 1 and 2. Old files lack the factors, which are those of Grok 1."""
    experts(keys, config)
    inner, has_mlp = config["intermediate_size"], "blk.0.ffn_up.weight" in keys.file.tensors
    config |= {
        "moe_intermediate_size": keys.count("expert_feed_forward_length", inner),
        "residual_moe": has_mlp,
        "mlp_beside_experts_size": inner if has_mlp else 0,
        "hidden_act": "gelu_pytorch_tanh",
        "embedding_multiplier_scale": keys.number("embedding_scale", 78.38367176906169),
        "output_multiplier_scale": keys.number("logit_scale", 0.5773502691896257),
        "attn_output_multiplier": keys.number("attention.output_scale", 0.08838834764831845),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 30.0),
        "router_logit_softcapping": keys.number("router_logit_softcapping", 30.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


def plm(keys: Keys, config: dict[str, Any]) -> None:
    """PLM."""
    _latent(keys, config)
    config["hidden_act"] = "relu2"


def minicpm3(keys: Keys, config: dict[str, Any]) -> None:
    """MiniCPM3. The file stores neither the size of a value nor the factors, which are those of the
    published model."""
    usual = max(1, config["hidden_size"] // config["num_attention_heads"])
    _latent(keys, config, value_dim=usual)
    longrope(keys, config)


def _latent(
    keys: Keys, config: dict[str, Any], value_dim: int | None = None, first: int = 0
) -> None:
    """Latent attention. Newer files describe it in its compressed form, and have the sizes of a
    head under keys of their own. `value_dim` is that of files without one, `first` the first layer
    that has it."""
    file = keys.file
    rotary = keys.count("rope.dimension_count", low=0)
    rank = keys.count("attention.kv_lora_rank")
    suffix = "_mla" if keys.get("attention.key_length_mla", None) is not None else ""
    length = keys.count(f"attention.key_length{suffix}")
    if length <= rotary:
        raise CheckpointError(
            f"{file.path}: keys of {length} numbers, of which {rotary} are rotary; allowed is more"
        )
    config |= {
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": length - rotary,
        "v_head_dim": value_dim or keys.count(f"attention.value_length{suffix}"),
        "num_key_value_heads": config["num_attention_heads"],
        "has_stacked_heads": f"blk.{first}.attn_kv_b.weight" not in file.tensors,
    }
    if f"blk.{first}.attn_q_a.weight" in file.tensors:
        config["q_lora_rank"] = keys.count("attention.q_lora_rank")
    scaling = config["rope_scaling"]
    if scaling and keys.get("rope.scaling.yarn_log_multiplier", None) is not None:
        # The file has 0.1 times `mscale_all_dim`, and the two factors are equal in every model.
        scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}


def _deepseek_experts(keys: Keys, config: dict[str, Any], is_sigmoid: bool) -> None:
    _further_layers(keys, config)
    count = keys.count("expert_count", 0, high=MAX_EXPERTS, low=0)
    config["n_routed_experts"] = config["num_experts"] = count
    if is_sigmoid and keys.architecture == "deepseek2":
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if not count:
        return
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", high=MAX_EXPERTS, low=0)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.get("expert_weights_norm", False)
    groups, kept = _DEEPSEEK_GROUPS.get((count, is_sigmoid), (1, 1))
    groups, kept = (1, 1) if keys.architecture == "glm-dsa" else (groups, kept)
    config["n_group"] = keys.count("expert_group_count", groups)
    config["topk_group"] = keys.count("expert_group_used_count", kept)
    if not is_sigmoid:
        is_limited = config["n_group"] > 1
        config["topk_method"] = "group_limited_greedy" if is_limited else "greedy"


def qwen3_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen3-MoE."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["norm_topk_prob"] = True
    config["decoder_sparse_step"] = 1
    config["mlp_only_layers"] = []


def grove_moe(keys: Keys, config: dict[str, Any]) -> None:
    """GroveMoE."""
    qwen3_moe(keys, config)
    config["experts_per_group"] = keys.count("experts_per_group", high=MAX_EXPERTS)
    name = "expert_chunk_feed_forward_length"
    config["group_expert_size"] = keys.count(name, config["head_dim"])
    config["group_scale"] = keys.number("expert_group_scale")


def arctic(keys: Keys, config: dict[str, Any]) -> None:
    """Arctic, whose files have experts in every layer."""
    experts(keys, config)
    config["decoder_sparse_step"] = 1


def ernie_moe(keys: Keys, config: dict[str, Any]) -> None:
    """ERNIE 4.5 with experts."""
    experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", 0, high=MAX_EXPERTS, low=0)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["decoder_sparse_step"] = keys.count("interleave_moe_layer_step")
    config["use_expert_bias"] = any(".exp_probs_b." in name for name in keys.file.tensors)
    config["norm_topk_prob"] = True


def gpt_oss(keys: Keys, config: dict[str, Any]) -> None:
    """gpt-oss."""
    config["num_local_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["intermediate_size"] = keys.count("expert_feed_forward_length")
    # Every second layer has full attention; the file does not store this.
    config["sliding_window"] = keys.count("attention.sliding_window")
    config["sliding_window_pattern"] = 2
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False  # as published; the file does not store it

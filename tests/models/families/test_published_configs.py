"""Families whose published configs and files differ from those of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network, spec_from_config
from parity_cases import parity_module
from tiny_models import (
    built,
    chain,
    checkpoint_of,
    hf_logits,
    hf_model,
    logits,
    with_fused_qkv,
)

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42, 7, 5, 17]
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act"),
    *("moe_intermediate_size", "num_experts_per_tok", "tie_word_embeddings", "head_dim"),
)


def saved(model: Any, folder: Path, config: dict[str, Any]) -> Checkpoint:
    """The model with the names of its published files, which saved ones have, and sizes of its
    config beside `config`."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    stored = checkpoint_of(model)
    sizes = {key: stored.config[key] for key in _SIZES if key in stored.config}
    stored.tensors = load_file(folder / "model.safetensors")
    stored.config = {**sizes, "architectures": [type(model).__name__], **config}
    return stored


def model_of(case: str) -> Any:
    family, settings = parity_module("test_parity").CASES[case]
    return hf_model(family, **settings)


def check(model: Any, stored: Checkpoint) -> None:
    found = logits(built(stored), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() < 1e-4


MIMO_V2 = {
    "model_type": "mimo_v2_flash",
    "hybrid_layer_pattern": [0, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 20,
    "swa_v_head_dim": 12,
    "v_head_dim": 12,
    "rope_theta": 5e4,
    "swa_rope_theta": 500.0,
    "partial_rotary_factor": 0.4,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "layernorm_epsilon": 1e-5,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "n_routed_experts": 6,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def test_mimo_v2(tmp_path: Path) -> None:
    """The window of a config does not count the row itself."""
    model = model_of("mimo v2")
    stored = saved(model, tmp_path, MIMO_V2)
    assert any(name.endswith("self_attn.attention_sink_bias") for name in stored.tensors)
    check(model, stored)


def test_mimo_v2_5(tmp_path: Path) -> None:
    """The rows of queries, keys and values are in as many shards as full attention has key heads.
    Wrong twin: one after the other, as in other fused matrices."""
    family, settings = parity_module("test_parity").CASES["mimo v2"]
    model = hf_model(family, **{**settings, "num_key_value_heads": 2})
    config = {
        **MIMO_V2,
        "model_type": "mimo_v2",
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "attention_projection_layout": "fused_qkv",
    }
    stored = saved(model, tmp_path, config)
    stored.config["architectures"] = ["MiMoV2ForCausalLM"]
    stored.tensors = with_fused_qkv(stored.tensors, 2)
    check(model, stored)
    whole = replace(stored, config={**stored.config, "attention_projection_layout": "split"})
    found = logits(built(whole), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() > 1e-2
    unknown = {**stored.config, "attention_projection_layout": "other"}
    with pytest.raises(CheckpointError, match="layout is 'other'; allowed is split or fused_qkv"):
        spec_from_config(unknown)


def test_values_of_fewer_numbers_than_keys_have_their_own_size() -> None:
    spec = spec_from_config(checkpoint_of(model_of("mimo v2")).config)
    shapes = [(one.num_kv_heads, one.head_dim, one.value_dim) for one in spec.cache_shapes if one]
    assert shapes == [(1, 20, 12), (2, 20, 12)] * 2
    assert [layer.has_sinks for layer in spec.layers] == [False, True] * 2


def test_kimi_linear(tmp_path: Path) -> None:
    """Layers are counted from 1, and each of queries, keys and values has its convolution."""
    model = model_of("kimi linear")
    config = {
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "full_attn_layers": [5],
            "kda_layers": [1, 2, 3, 4],
            "head_dim": 12,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 256,
        "max_position_embeddings": None,
        "mla_use_nope": True,
        "kv_lora_rank": 20,
        "q_lora_rank": None,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_experts_per_tok": None,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-2,
        "num_nextn_predict_layers": 0,
    }
    stored = saved(model, tmp_path, config)
    # Published files have the usual name of the dense layer's MLP, saved ones that of experts.
    stored.tensors = {
        name.replace("0.block_sparse_moe", "0.mlp"): tensor
        for name, tensor in stored.tensors.items()
    }
    assert any(name.endswith("self_attn.q_conv1d.weight") for name in stored.tensors)
    assert any(name.endswith("block_sparse_moe.experts.0.w1.weight") for name in stored.tensors)
    check(model, stored)
    stored.config["mla_use_nope"] = False
    with pytest.raises(CheckpointError, match="mla_use_nope is False; allowed is true"):
        built(stored)


def test_zamba_2(tmp_path: Path) -> None:
    """Layers share the matrices of blocks, which only some of the layers have."""
    model = model_of("zamba 2 odd")
    config = {
        "model_type": "zamba2",
        "layers_block_type": ["hybrid"] * 3,
        "hybrid_layer_ids": [0, 1, 2],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 5,
        "use_mem_rope": True,
        "use_long_context": False,
        "rope_theta": 500.0,
        "add_bias_linear": True,
        "attention_head_dim": 8,
        "attention_hidden_size": 32,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_headdim": 4,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "time_step_limit": None,
        "rms_norm_eps": 1e-2,
    }
    stored = saved(model, tmp_path, config)
    assert not any("layers.2.shared_transformer" in name for name in stored.tensors)
    check(model, stored)
    first, second, third = load_network(stored).weights.layers
    assert first.query and second.query and third.query
    assert first.query.weight is third.query.weight is not second.query.weight
    assert first.query.update is not third.query.update
    check(model, checkpoint_of(model, num_mem_blocks=3))  # as layers of their own
    stored.config["use_long_context"] = True
    with pytest.raises(CheckpointError, match="use_long_context is True; allowed is false"):
        built(stored)


def test_the_layers_of_zamba_2() -> None:
    """A config without a list of layers has that of the first model."""
    config = checkpoint_of(model_of("zamba 2")).config
    del config["layers_block_type"]
    config.pop("layer_types", None)
    layers = spec_from_config({**config, "num_hidden_layers": 54}).layers
    hybrids = [i for i, layer in enumerate(layers) if layer.memory == "embeddings"]
    assert hybrids == [6, 12, 18, 24, 30, 36, 42, 47, 51]


def test_olmo_hybrid(tmp_path: Path) -> None:
    """Norms of recurrent layers have names of their own, and there is no base of rotations."""
    family, settings = parity_module("test_parity").CASES["olmo hybrid"]
    # `transformers` saves the convolutions as three equal parts.
    model = hf_model(family, **{**settings, "linear_value_head_dim": 6})
    config = {
        "model_type": "olmo_hybrid",
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    }
    stored = saved(model, tmp_path, config)
    for name in ("0.attention_layer_norm", "0.feedforward_layer_norm", "0.linear_attn.q_conv1d"):
        assert f"model.layers.{name}.weight" in stored.tensors
    check(model, stored)
    del stored.config["layer_types"]
    check(model, stored)
    stored.config["linear_num_key_heads"] = 3
    with pytest.raises(CheckpointError, match="num_groups is 3; allowed is a divisor of the 4"):
        built(stored)


def test_ling_3(tmp_path: Path) -> None:
    """The names and keys of the published code, without a list of layer types."""
    model = model_of("ling 3")
    config = {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": 4,
        "head_dim": 12,
        "kv_lora_rank": 20,
        "q_lora_rank": None,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -3.0,
        "gated_attention_proj_granularity_type": "head_wise",
        "short_conv_kernel_size": 4,
        "rope_theta": 6e6,
        "rms_norm_eps": 1e-2,
        "max_position_embeddings": 256,
    }
    stored = saved(model, tmp_path, config)
    for name in ("word_embeddings", "layers.0.attention.q_conv1d", "layers.3.attention.dense"):
        assert f"model.{name}.weight" in stored.tensors
    check(model, stored)
    for key, value, allowed in (
        ("no_kda_lora", False, "true"),
        ("gated_attention_proj_granularity_type", "element_wise", "head_wise"),
        ("expert_swiglu_limit_list", [None, 7.0], "null"),
        ("kda_lower_bound", 1.0, "a number from"),
    ):
        changed = {**stored.config, key: value}
        with pytest.raises(CheckpointError, match=f"{key} is .* allowed is {allowed}") as caught:
            spec_from_config(changed)
        assert "\n" not in str(caught.value)


def test_minimax_text_01(tmp_path: Path) -> None:
    family, settings = parity_module("test_parity").CASES["minimax"]
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    model = hf_model(family, **{**settings, "layer_types": types})
    config = {
        "model_type": "minimax_text_01",
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [0, 0, 1, 0],
        "layernorm_linear_attention_alpha": 1.7,
        "layernorm_linear_attention_beta": 0.8,
        "layernorm_full_attention_alpha": 1.3,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_mlp_alpha": 1.6,
        "layernorm_mlp_beta": 0.7,
        "postnorm": True,
        "rotary_dim": 12,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 5,
        "shared_intermediate_size": 0,
    }
    stored = saved(model, tmp_path, config)
    assert any("block_sparse_moe" in name for name in stored.tensors)
    check(model, stored)
    for key, value in (("postnorm", False), ("shared_intermediate_size", 64)):
        changed = {**stored.config, key: value}
        with pytest.raises(CheckpointError, match=f"{key} is {value}; allowed is") as caught:
            spec_from_config(changed)
        assert "\n" not in str(caught.value)


def test_minimax_m3(tmp_path: Path) -> None:
    """The sizes and the indexer under other keys, and layers with experts as flags."""
    family, settings = parity_module("test_parity").CASES["minimax m3"]
    model = hf_model(family, **settings)
    keys = ("layer_types", "mlp_layer_types", "rope_parameters")
    stored = checkpoint_of(model, moe_layer_freq=[0, 1, 1, 1], rope_theta=500.0)
    stored.config = {
        **{key: value for key, value in stored.config.items() if key not in keys},
        "hidden_act": "swigluoai",
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 0],
        },
    }
    for name in list(stored.tensors):
        if ".indexer." in name:
            stored.tensors[name.replace(".indexer.", ".index_")] = stored.tensors.pop(name)
    check(model, stored)
    stored.config["sparse_attention_config"]["sparse_attention_freq"] = [0, 1]
    with pytest.raises(CheckpointError, match="sparse_attention_freq is .* each of 4 layers"):
        spec_from_config(stored.config)

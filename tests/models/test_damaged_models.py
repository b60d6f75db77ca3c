"""Checkpoints with invalid values raise errors of one line and never crash the process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode.certification.tiny import tiny_llm, tiny_model
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.interface import Attention, ClampedSwiglu, Rope, Weight
from anydecode.models.families import spec_from_config
from anydecode.models.loading import gpt, load_checkpoint
from anydecode.models.lora import read_factors
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.spec import LatentSpec, LowRankQuery
from gguf_models import make_tensors, write_gguf
from tiny_models import BASE, LATENT_SIZES, built, checkpoint_of, hf_model, own_model

INVALID_VALUES: list[Any] = [
    -1,
    2**31,
    2**40,
    float("nan"),
    float("inf"),
    1.5,
    "x",
    "64",
    [],
    [1],
    {},
    True,
]
TESTS = Path(__file__).parents[1]
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "sliding_window",
)
FACTORS = ("rms_norm_eps", "rope_theta")
CONFIG: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 8,
    "use_sliding_window": True,
}


def assert_rejected(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(config)
    message = str(caught.value)
    assert name in message and "allowed is" in message and "\n" not in message, message


@pytest.mark.parametrize("key", SIZES)
def test_sizes_must_be_integers_in_range(key: str) -> None:
    assert spec_from_config(CONFIG).num_layers == 3
    for value in [*INVALID_VALUES, *([] if key == "num_experts" else [0])]:
        assert_rejected({**CONFIG, key: value}, key)


@pytest.mark.parametrize("key", FACTORS)
def test_factors_must_be_finite_numbers(key: str) -> None:
    for value in [-1, float("nan"), float("inf"), 1e300, "x", "64", [], [1], {}, True]:
        assert_rejected({**CONFIG, key: value}, key)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 15}, "rotary size is 15"),
        ({"head_dim": 1}, "rotary size is 1"),
        ({"num_experts_per_tok": 5}, "experts_per_token is 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
        ({"num_attention_heads": 65536, "head_dim": 65536}, "num_heads \\* head_dim"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"layer_types": [1, 2, 3]}, "layer_types"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"model_type": "phi3", "partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.7}, "rotary size is 11"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "a2d-llama", "block_size": "x"}, "block_size"),
        ({"model_type": "granite", "embedding_multiplier": 0}, "embedding_multiplier"),
        ({"model_type": "granite", "attention_multiplier": "x"}, "attention_multiplier"),
        ({"model_type": "granite", "residual_multiplier": float("nan")}, "residual_multiplier"),
        ({"model_type": "granite", "logits_scaling": -1}, "logits_scaling"),
        ({"model_type": "minicpm", "scale_depth": [1]}, "scale_depth"),
        ({"model_type": "starcoder2", "norm_epsilon": "x"}, "layer_norm_eps"),
        ({"model_type": "cohere", "logit_scale": 0}, "logit_scale"),
        ({"model_type": "cohere", "use_parallel_residual": "x"}, "use_parallel_residual"),
        ({"model_type": "gpt_neox", "partial_rotary_factor": -1}, "partial_rotary_factor"),
        ({"model_type": "minicpm", "scale_emb": True}, "scale_emb"),
        ({"model_type": "minicpm", "dim_model_base": 0}, "dim_model_base"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        ({"model_type": "glm4", "partial_rotary_factor": "x"}, "partial_rotary_factor"),
        (
            {"model_type": "ministral3", "rope_scaling": {"llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": -1}},
            "alpha",
        ),
    ],
)
def test_inconsistent_fields_are_rejected(change: dict[str, Any], name: str) -> None:
    config = {**CONFIG, **change}
    if "model_type" in change:  # none of these families has experts
        config["num_experts"] = None
    assert_rejected(config, name.replace("\\", ""))


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": "x"}, "factor is 'x'"),
        ({"rope_type": "dynamic", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": "x"}, "mscale"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor is 4",
        ),
        ({"rope_type": "longrope", "short_factor": "x", "long_factor": [1.0]}, "short_factor"),
        (
            {"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0]},
            "short_factor",
        ),
    ],
)
def test_invalid_rope_scalings_are_rejected(scaling: dict[str, Any], name: str) -> None:
    assert_rejected({**CONFIG, "rope_scaling": scaling}, name)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"n_head": 0}, "num_attention_heads is 0; allowed is"),
        ("gpt2", {"n_head": 5}, "num_attention_heads is 5; allowed is"),
        ("gpt2", {"n_embd": "x"}, "hidden_size is 'x'; allowed is"),
        ("gpt2", {"n_inner": -1}, "intermediate_size is -1; allowed is"),
        ("gpt2", {"n_positions": 300}, "embed_positions.weight has shape"),
        ("gpt2", {"activation_function": "tanh"}, "activation 'tanh'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_embd": 96}, "c_attn.weight has shape"),
        ("gptj", {"rotary_dim": 99}, "rotary_dim is 99; allowed is"),
        ("gptj", {"rotary_dim": 1}, "rotary size"),
        ("codegen", {"n_head": 6}, "num_attention_heads is 6; allowed is a multiple of 4"),
        ("falcon", {"alibi": 1}, "alibi is 1; allowed is"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not"),
        ("opt", {"do_layer_norm_before": 3}, "do_layer_norm_before is 3; allowed is"),
        ("opt", {"word_embed_proj_dim": 7}, "project_in.weight is missing"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0; allowed is"),
        ("bloom", {"n_head": 5}, "num_attention_heads is 5; allowed is"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm True is not supported",
        ),
        ("bloom", {"seq_length": 0}, "max_position_embeddings is 0; allowed is"),
        ("mpt", {"attn_config": 3}, "attn_config is 3; allowed is an object"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi False is not supported"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True is not supported"),
        ("mpt", {"attn_config": {"attn_type": "x"}}, "attn_type 'x' is not supported"),
        ("mpt", {"attn_config": {"alibi_bias_max": "x"}}, "alibi_bias_max is 'x'; allowed is"),
        ("mpt", {"attn_config": {"clip_qkv": 0}}, "clip_qkv is 0; allowed is"),
        ("mpt", {"attn_config": {"softmax_scale": [1]}}, "softmax_scale is [1]; allowed is"),
        ("mpt", {"expansion_ratio": "x"}, "expansion_ratio is 'x'; allowed is"),
        ("mpt", {"expansion_ratio": 1e-9}, "intermediate_size is 0; allowed is"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is not supported"),
        ("mpt", {"no_bias": False}, "no_bias False is not supported"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale 0.5 is not supported"),
        ("falcon", {"multi_query": "x"}, "multi_query is 'x'; allowed is"),
        ("falcon", {"new_decoder_architecture": 1}, "new_decoder_architecture is 1; allowed is"),
    ],
)
def test_invalid_configs_of_gpt_layouts_are_rejected(
    family: str, change: dict[str, Any], message: str
) -> None:
    names = {"gpt2": "GPT2", "falcon": "Falcon", "bloom": "Bloom", "mpt": "Mpt"}
    names |= {"gptj": "GPTJ", "codegen": "CodeGen", "opt": "OPT"}
    rotary = {"rotary_dim": 8} if family in ("gptj", "codegen") else {}
    model = hf_model(names[family], **rotary)
    with pytest.raises(CheckpointError) as caught:
        built(checkpoint_of(model, **change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_projections_of_opt_that_do_not_fit_are_refused() -> None:
    model = hf_model("OPT", word_embed_proj_dim=20)
    with pytest.raises(CheckpointError, match="word_embed_proj_dim is 21"):
        built(checkpoint_of(model, word_embed_proj_dim=21))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"altup_num_inputs": 0}, "altup_num_inputs is 0; allowed is"),
        ({"altup_num_inputs": 3}, "modality_router.weight has shape"),
        ({"altup_num_inputs": 99}, "num_streams is 99; allowed is"),
        ({"altup_active_idx": 4}, "active_stream is 4; allowed is"),
        ({"laurel_rank": 7}, "laurel.linear_left.weight has shape"),
        ({"altup_correct_scale": 1}, "altup_correct_scale is 1; allowed is"),
        ({"activation_sparsity_pattern": [0.1]}, "activation_sparsity_pattern is [0.1]; allowed"),
        ({"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern is 1.0; allowed is"),
        ({"activation_sparsity_pattern": ["x"] * 3}, "activation_sparsity_pattern is 'x'"),
        ({"intermediate_size": [80]}, "intermediate_size is [80]; allowed is"),
        ({"intermediate_size": [80, 80, 79]}, "mlp.gate_proj.weight has shape"),
        ({"gate_cutoffs": 3}, "gate_cutoffs is 3; allowed is"),
        ({"gate_cutoffs": ["x"] * 3}, "gate_cutoff is 'x'; allowed is"),
        ({"hidden_size_per_layer_input": 0}, "streams need embeddings of tokens in every layer"),
    ],
)
def test_invalid_settings_of_gemma3n_are_rejected(change: dict[str, Any], message: str) -> None:
    sizes = {"num_kv_shared_layers": 0, "laurel_rank": 6, "hidden_size_per_layer_input": 12}
    model = hf_model("Gemma3n", **sizes, vocab_size_per_layer_input=131)
    with pytest.raises(CheckpointError) as caught:
        built(checkpoint_of(model, **change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; allowed is"),
        ({"floor_scale": 0}, "floor_scale is 0; allowed is"),
        ({"attn_scale": -1.0}, "attn_scale is -1.0; allowed is"),
        ({"attn_temperature_tuning": "x"}, "attn_temperature_tuning is 'x'; allowed is"),
        ({"no_rope_layers": [1, 0]}, "has fewer entries"),
        ({"layer_types": ["chunked_attention"] * 2}, "has fewer entries"),
        ({"moe_layers": 3}, "moe_layers is 3; allowed is"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0; allowed is"),
        ({"intermediate_size_mlp": None}, "lacks 'intermediate_size_mlp'"),
        ({"num_experts_per_tok": 9}, "experts_per_token is 9; allowed is"),
        ({"head_dim": 15}, "rotary size is 15; allowed is"),
    ],
)
def test_invalid_settings_of_llama4_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model = hf_model("Llama4", num_local_experts=4, no_rope_layer_interval=2)
        built(checkpoint_of(model, **change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


DEEPSEEK: dict[str, Any] = {
    **LATENT_SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Granite": {},
    "GraniteMoeHybrid": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 72,
    },
    "Glm4": {"head_dim": 16},
    "Ernie4_5": {"head_dim": 16},
    "SeedOss": {"head_dim": 16},
    "Olmo3": {"sliding_window": 7},
    "Ministral3": {"head_dim": 16},
    "Exaone4": {"sliding_window": 6},
    "HunYuanDenseV1": {"head_dim": 16},
    "Starcoder2": {"sliding_window": 6},
    "Cohere2": {"sliding_window": 6},
    "GPT2": {},
    "GPTNeoX": {"hidden_size": 64},
    "Falcon": {},
    "Bloom": {},
    "Llama4": {"num_local_experts": 4},
    "Gemma3n": {"num_kv_shared_layers": 0},
    "Mpt": {},
    "GptOss": {"num_local_experts": 4},
    "Glm4Moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "Glm4MoeLite": {key: DEEPSEEK[key] for key in DEEPSEEK if key != "first_k_dense_replace"},
    "Qwen2Moe": {"num_experts": 4},
    "Olmoe": {"num_experts": 4},
    "FalconMamba": {},
    "RecurrentGemma": {},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key_is_accepted_or_refused_in_one_line(family: str) -> None:
    config = hf_model(family, **FAMILIES[family]).config.to_dict()
    num_refused = 0
    for key in config:
        for value in [*INVALID_VALUES, 0, None, 1e300, [1, 2, 3], {"x": 1}]:
            changed = {**config, key: value}
            try:
                if gpt.is_gpt(changed):
                    changed, _ = gpt.to_hf_layout(changed, {})
                spec_from_config(changed)
            except CheckpointError as error:
                num_refused += 1
                assert "\n" not in str(error)
    assert num_refused > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"kv_lora_rank": 1 << 17}, "kv_lora_rank is 131072"),
        ({"q_lora_rank": "x"}, "q_lora_rank is 'x'"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim is 0"),
        ({"qk_rope_head_dim": 7}, "the rotary size is 7; allowed is an even number"),
        ({"v_head_dim": -1}, "v_head_dim is -1"),
        ({"v_head_dim": 1 << 16, "num_attention_heads": 1 << 16}, "num_heads"),
        ({"rope_interleave": 1}, "rope_interleave is 1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; allowed is 1"),
        ({"n_group": 3}, "num_groups is 3"),
        ({"topk_group": 3}, "groups_per_token is 3"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"topk_method": []}, "topk_method is []"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed is 'sigmoid'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": "x", "factor": 4.0}},
            "mscale_all_dim is 'x'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "lacks 'factor'"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob is True"),
        (
            {"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'",
        ),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
)
def test_invalid_configs_of_latent_attention_are_rejected(
    change: dict[str, Any], message: str
) -> None:
    config = hf_model("DeepseekV3", **DEEPSEEK).config.to_dict()
    spec_from_config(config)
    if "model_type" in change:
        del config["architectures"]
    with pytest.raises(CheckpointError) as caught:
        spec_from_config({**config, **change})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "attention", "message"),
    [
        ({"latent": None}, {}, "lacks one of latent, attention and latent_dim"),
        ({"rope": None}, {"head_dim": 19}, "rotary size is -1"),
        ({}, {"latent_dim": None}, "lacks one of latent"),
        ({}, {"latent_dim": 0}, "latent_dim is 0"),
        ({}, {"latent_dim": 24}, "head_dim is 28; allowed is 32"),
        ({}, {"num_kv_heads": 2}, "num_kv_heads is 2; allowed is an integer from 1 to 1"),
        ({"latent": LatentSpec(0, 12)}, {}, "key_dim is 0"),
        ({"latent": LatentSpec(10, 1 << 17)}, {}, "value_dim is 131072"),
        ({"low_rank_query": LowRankQuery(0)}, {}, "query_rank is 0"),
        ({"latent": LatentSpec(10, 12, norm_eps=2.0)}, {}, "norm_eps is 2"),
        ({"qk_norm": "head"}, {}, "qk_norm is 'head'; allowed is unset with latent attention"),
    ],
)
def test_specs_of_latent_attention_are_checked(
    change: dict[str, Any], attention: dict[str, Any], message: str
) -> None:
    spec = spec_from_config(hf_model("DeepseekV3", **DEEPSEEK).config.to_dict())
    layer = spec.layers[0]
    assert layer.attention is not None
    changed = replace(layer, **change, attention=replace(layer.attention, **attention))
    with pytest.raises(CheckpointError, match=message):
        replace(spec, layers=(changed, *spec.layers[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": []}, "keys: the weights have 0 matrices; allowed are 4"),
        ({"norm": np.ones(19, np.float32)}, "the latent norm is"),
        ({"query_down_norm": None}, "the query's inner norm is None"),
        ({"query_down": None}, "only one of the spec and the weights has low-rank queries"),
    ],
)
def test_weights_of_latent_attention_are_checked(change: dict[str, Any], message: str) -> None:
    network = own_model(hf_model("DeepseekV3", **DEEPSEEK)).network
    layer = network.weights.layers[1]
    for name, value in change.items():
        setattr(layer if "query" in name else layer.latent, name, value)
    with pytest.raises(CheckpointError, match=f"layer 1, {message}"):
        Network(network.spec, network.weights)


def test_learned_positions_bound_the_context() -> None:
    config = checkpoint_of(hf_model("GPT2")).config
    assert spec_from_config(config, max_positions=100).max_positions == 100
    with pytest.raises(CheckpointError, match="max_positions is 300; allowed is an integer from 1"):
        spec_from_config(config, max_positions=300)


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("llama", {"hidden_act": "xielu"}, "activation is 'xielu'; allowed is xielu in plain MLPs"),
        ("olmo", {"clip_qkv": -1}, "clip_qkv is -1"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk is .*the same number for every layer"),
        ("hunyuan_v1_moe", {"moe_topk": []}, "moe_topk is"),
        ("minimax_m2", {"rotary_dim": 99}, "rotary_dim is 99; allowed is"),
        ("minimax_m2", {"num_local_experts": 2, "rotary_dim": 3}, "rotary size is 3"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset is 8"),
        ("jamba", {"num_experts": 4, "expert_layer_period": 0}, "expert_layer_period is 0"),
        ("bamba", {"attn_layer_indices": "x"}, "attn_layer_indices"),
    ],
)
def test_settings_of_families_that_are_refused(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    config = {**CONFIG, "num_experts": 0, "model_type": model_type, **change}
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)


def test_replaced_specs_are_checked() -> None:
    spec = spec_from_config(CONFIG)
    layer = spec.layers[0]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"layers": ()}, "number of layers is 0"),
        ({"logit_softcap": 0.0}, "logit_softcap"),
        ({"layers": (replace(layer, norms="x"),)}, "norms is 'x'"),
        (
            {"layers": (replace(layer, mlp="plain", activation=ClampedSwiglu()),)},
            "activation is ClampedSwiglu",
        ),
        ({"layers": (replace(layer, rope=Rope(np.ones(9, np.float32))),)}, "rotary size is 18"),
        ({"layers": (replace(layer, rope=Rope(np.full(8, np.inf))),)}, "not all finite"),
        ({"layers": (replace(layer, attention=Attention(4, -2, 16, 0.25)),)}, "num_kv_heads is -2"),
        ({"layers": (replace(layer, attention=Attention(4, 2, 16, 0.0)),)}, "scale is 0"),
    ]
    for change, message in changes:
        with pytest.raises(CheckpointError, match=message):
            replace(spec, **change)


GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 12,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
    "num_kv_shared_layers": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; allowed is an integer from 0 to"),
        ({"num_kv_shared_layers": 3}, "no earlier layer of type full_attention"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2'"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ({"hidden_size_per_layer_input": 9}, "per_layer.* has shape"),
        ({"vocab_size_per_layer_input": 130}, "embed_tokens_per_layer.weight has shape"),
        ({"per_layer_config": []}, "per_layer_config is .*allowed is an object"),
        ({"per_layer_config": {"1": 3}}, "1 is 3; allowed is an object"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, "head_dim is 0"),
        ({"per_layer_config": {"1": {"head_dim": 18}}}, "head_dim is 12|head_dim is 18"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
        ({"use_bidirectional_attention": "all"}, "bidirectional attention"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v is 1; allowed is true or false"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional",
             "rope_theta": 1e4, "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor is 1.5",
        ),
    ],
)  # fmt: skip
def test_invalid_settings_of_gemma4_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(checkpoint_of(hf_model("Gemma4", **GEMMA_4), **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (2, {"cache_layer": 2}, "layer 2: cache_layer is 2; allowed is an integer from 0 to 1"),
        (2, {"cache_layer": -1}, "cache_layer is -1"),
        (2, {"cache_layer": 1}, "num_kv_heads|head_dim is 12; allowed is 16, as in layer 1"),
        (3, {"cache_layer": 2}, "cache_layer is 2; allowed is an earlier layer with keys"),
        (0, {"cache_layer": 0}, "cache_layer is 0"),
        (1, {"attention": None, "rope": None}, "layer 3: cache_layer is 1"),
        (0, {"activation": ClampedSwiglu()}, "per_layer_size is set with a clamped SwiGLU"),
    ],
)
def test_specs_of_shared_caches_are_checked(
    index: int, change: dict[str, Any], message: str
) -> None:
    spec = spec_from_config(hf_model("Gemma4", **GEMMA_4).config.to_dict())
    layers = list(spec.layers)
    layers[index] = replace(layers[index], **change)
    with pytest.raises(CheckpointError, match=message):
        replace(spec, layers=tuple(layers))
    for change in ({"per_layer_size": -1}, {"per_layer_scale": 0.0}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            replace(spec, **change)


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (None, {"per_layer": None}, "only one of the spec and the weights has embeddings per"),
        (0, {"per_layer": None}, "layer 0, only one of the spec and the weights has embeddings"),
        (1, {"scale": None}, "layer 1, only one of the spec and the weights has a scale"),
        (1, {"scale": float("nan")}, "layer 1, scale is nan"),
        (0, {"key": None}, "layer 0, key is missing"),
    ],
)
def test_weights_of_gemma4_are_checked(
    layer: int | None, change: dict[str, Any], message: str
) -> None:
    network = own_model(hf_model("Gemma4", **GEMMA_4)).network
    weights: Any = network.weights if layer is None else network.weights.layers[layer]
    for name, value in change.items():
        setattr(weights, name, value)
    with pytest.raises(CheckpointError, match=message):
        Network(network.spec, network.weights)


def test_replaced_recurrences_are_checked() -> None:
    config = {"model_type": "falcon_mamba", "hidden_size": 32, "num_hidden_layers": 1}
    spec = spec_from_config({**config, "vocab_size": 40, "mixer_rms_eps": 1e-4})
    layer = spec.layers[0]
    recurrence = layer.recurrence
    assert recurrence is not None and recurrence.gate_norm_eps == 1e-4
    shape = recurrence.shape
    changes: list[tuple[Any, str]] = [
        (replace(recurrence, gate_norm_eps=-1.0), "gate_norm_eps is -1.0"),
        (replace(recurrence, shape=replace(shape, rule="x")), "rule is 'x'"),
        (replace(recurrence, shape=replace(shape, width=65)), "conv width is 65; allowed is 64"),
        (
            replace(recurrence, shape=replace(shape, rule="ssd", width=96)),
            "gate_norm_eps is 0.0001; allowed is None with 'ssd'",
        ),
    ]
    for changed, message in changes:
        with pytest.raises(CheckpointError, match=message):
            replace(spec, layers=(replace(layer, recurrence=changed),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_step_rank": 0}, "time_step_rank is 0"),
        ({"time_step_rank": 5}, "dt_proj.weight has shape"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed is silu"),
        ({"state_size": 8}, r"A_log has shape \(80, 16\), not \(80, 8\)"),
        ({"intermediate_size": 96}, "in_proj.weight has shape"),
        ({"conv_kernel": 3}, "conv1d.weight has shape"),
        ({"mixer_rms_eps": 2}, "mixer_rms_eps is 2"),
    ],
)
def test_invalid_settings_of_mamba_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(checkpoint_of(hf_model("FalconMamba"), **change))
    assert "\n" not in str(caught.value)


def test_more_layers_than_in_the_config_are_rejected() -> None:
    with pytest.raises(
        CheckpointError, match="num_hidden_layers is 2, but tiny contains more layers"
    ):
        built(checkpoint_of(hf_model("Llama"), num_hidden_layers=2))


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_must_be_booleans(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is 'x'; allowed is true or false"):
        built(checkpoint_of(hf_model("Llama"), **{key: "x"}))


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("Ernie4_5", "use_bias", "attention_bias"),
        ("SeedOss", "attention_out_bias", "attention_out_bias"),
    ],
)
def test_flags_of_biases_must_be_booleans(family: str, key: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 1; allowed is true or false"):
        built(checkpoint_of(hf_model(family), **{key: 1}))


def experts_with(change: Any) -> None:
    stored = checkpoint_of(hf_model("Qwen3Moe", **{k: CONFIG[k] for k in CONFIG if k not in BASE}))
    stacks = [name for name in stored.tensors if name.endswith(("gate_up_proj", "down_proj"))]
    assert stacks
    stored.tensors = {**stored.tensors, **{n: change(stored.tensors[n]) for n in stacks}}
    built(stored)


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack[..., :-1],
        lambda stack: stack[:-1],
        lambda stack: stack[:, :-1],
        lambda stack: np.concatenate([stack, stack[:1]]),
        lambda stack: stack.astype(np.int32),
    ],
)
def test_stacked_experts_must_match_the_config(change: Any) -> None:
    with pytest.raises(CheckpointError, match="experts"):
        experts_with(change)


def test_weights_with_wrong_data_do_not_reach_the_kernels() -> None:
    from anydecode.kernels.library import load_library
    from anydecode.kernels.packing import Packer

    library = load_library()
    if library is None:
        pytest.skip("the native kernels are not available here")
    packer = Packer(library, 1)
    for format, data in (
        ("F32", np.zeros((4, 31), np.float32)),
        ("F32", np.zeros((3, 32), np.float32)),
        ("F16", np.zeros((4, 32), np.float32)),
        ("Q8_0", np.zeros((4, 33), np.uint8)),
    ):
        with pytest.raises(CheckpointError, match="not a .* matrix of 4 by 32"):
            packer.pack(Weight(format, 4, 32, data, "w"))


@pytest.mark.parametrize("threads", [0, -1, 257, 2**40, 1.0, "2", True])
def test_threads_must_be_an_integer_in_range(threads: Any) -> None:
    with pytest.raises(InvalidRequestError, match="threads is .* from 1 to 256"):
        choose_executor(threads=threads)
    with pytest.raises(InvalidRequestError, match="threads is .* from 1 to 256"):
        choose_executor("torch", threads)


@pytest.mark.parametrize("token", [-1, 259, 2**31, 2**40, 1.0, "5", None, True])
def test_prompt_tokens_must_be_in_the_vocabulary(token: Any) -> None:
    with tiny_llm() as llm:
        with pytest.raises(InvalidRequestError, match="token"):
            llm.generate([1, token], max_tokens=1)
        assert llm.encode(np.array([5, 6], np.int32)) == [5, 6]


def test_text_tokens_must_have_embeddings() -> None:
    with tiny_llm() as llm:
        llm.model.spec = replace(llm.model.spec, vocab_size=60)
        with pytest.raises(InvalidRequestError, match="token 97 is not in the vocabulary of 60"):
            llm.generate("a", max_tokens=1)


def test_weights_must_match_the_spec() -> None:
    pytest.importorskip("torch")  # the native executor frees the matrices
    model = tiny_model(backend="torch")
    with pytest.raises(CheckpointError, match=r"layer 0, query is a matrix of shape"):
        Network(
            replace(
                model.spec,
                layers=(
                    replace(model.spec.layers[0], attention=Attention(2, 2, 16, 0.25)),
                    model.spec.layers[1],
                ),
            ),
            model.network.weights,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": "x"}, "has rank 2, but its config has 'x'"),
        ({"lora_alpha": "x"}, "adapter_config.json: lora_alpha is 'x'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]"),
    ],
)
def test_adapters_with_invalid_values_are_rejected(
    change: Any, message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, (2, 8), (8, 2), **change)
    with pytest.raises(CheckpointError, match=message):
        read_factors(tmp_path)


@pytest.mark.parametrize(("down", "up"), [((0, 8), (8, 0)), ((8,), (8,)), ((2, 8), (8, 3))])
def test_adapters_of_wrong_shapes_are_rejected(down: Any, up: Any, tmp_path: Path) -> None:
    save_adapter(tmp_path, down, up)
    with pytest.raises(CheckpointError, match=r"allowed are \[rank, in\] and \[out, rank\]"):
        read_factors(tmp_path)


def save_adapter(folder: Path, down: tuple[int, ...], up: tuple[int, ...], **change: Any) -> None:
    shapes = {"m.lora_A.weight": down, "m.lora_B.weight": up}
    factors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": None, "lora_alpha": 4, **change}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", 0, "sliding_window_pattern is 0"),
        ("attention.sliding_window_pattern", "x", "sliding_window_pattern is 'x'"),
        ("final_logit_softcapping", "x", "final_logit_softcapping is 'x'"),
        ("rope.freq_base", float("inf"), "rope.freq_base is inf"),
        ("rope.freq_base", True, "rope.freq_base is True"),
        ("block_count", True, "block_count is True"),
        ("block_count", 0, "block_count is 0"),
        ("block_count", 2.0, "block_count is 2.0"),
        ("rope.freq_base_swa", [1], r"rope.freq_base_swa is \[1\]"),
    ],
)
def test_invalid_gguf_metadata_are_rejected(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anydecode.models.loading.gguf as loading

    class Changed(loading.GGUFFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.metadata[f"gemma3.{key}"] = value

    monkeypatch.setattr(loading, "GGUFFile", Changed)
    write_gguf(tmp_path / "m.gguf", "gemma3", make_tensors("gemma3"))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m.gguf")


# Cases that once read out of bounds: a rotary size larger than a head, more experts per token than
# there are experts, experts of other widths, invalid numbers of threads.
_CRASHES = """
import sys
sys.path[:0] = sys.argv[1:]
from anydecode.errors import AnydecodeError
from anydecode.certification.tiny import tiny_model
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.spec import LatentSpec, LowRankQuery
from test_damaged_models import CONFIG, experts_with
from tiny_models import BASE, chain, checkpoint_of, greedy, hf_model

MOE = {k: CONFIG[k] for k in CONFIG if k not in BASE}

def run(stored, threads=1):
    greedy(build_model(stored, executor=choose_executor("native", threads)), [5, 6, 7], 3)

def odd_heads():
    stored = checkpoint_of(hf_model("Llama", head_dim=16), head_dim=15)
    for name, tensor in stored.tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            stored.tensors[name] = tensor[: len(tensor) // 16 * 15]
        if name.endswith("o_proj.weight"):
            stored.tensors[name] = tensor[:, :60]
    run(stored)

def moe(**change):
    run(checkpoint_of(hf_model("Qwen3Moe", **MOE), **change))

for action in (
    odd_heads,
    lambda: moe(num_experts_per_tok=7),
    lambda: moe(num_experts_per_tok=2**31),
    lambda: experts_with(lambda stack: stack[..., :-8]),
    lambda: run(checkpoint_of(hf_model("Llama")), -1),
    lambda: run(checkpoint_of(hf_model("Llama")), 2**31),
):
    try:
        action()
    except AnydecodeError as error:
        print("refused", error, flush=True)
    else:
        print("ran", flush=True)
"""


@pytest.mark.slow
def test_invalid_models_do_not_crash_the_process() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", _CRASHES, str(TESTS), str(TESTS / "models")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and all(line.startswith("refused ") for line in lines), lines

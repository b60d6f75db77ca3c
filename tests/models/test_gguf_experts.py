"""Mixtures of experts in GGUF, with the names and metadata of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.mtp import has_mtp, load_mtp
from gguf_models import add_metadata, finish, interleave, start_writer
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TOKENS = [5, 17, 99, 3, 128, 64, 64, 11, 42, 7, 7, 90]
SHARED = {f"{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
#: architecture -> (classes of `transformers`, settings, modules of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "qwen2moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "rms_norm_eps": 1e-6,
        },
        {
            "post_attention_layernorm": "ffn_norm",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            **{f"mlp.shared_expert.{key}": name for key, name in SHARED.items()},
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        {
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        },
    ),
    "glm4moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 1e-5,
        },
        {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            **{f"mlp.shared_experts.{key}": name for key, name in SHARED.items()},
        },
    ),
}
FAMILIES["ernie4_5-moe"] = (
    "Ernie4_5_Moe",
    {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
    {
        **FAMILIES["glm4moe"][2],
        "post_attention_layernorm": "ffn_norm",
    },
)
NORMS = {
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
FAMILIES["qwen3moe"] = (
    "Qwen3Moe",
    {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
    NORMS,
)
FAMILIES["qwen3vlmoe"] = FAMILIES["qwen3moe"]
FAMILIES["llama"] = (  # Mixtral
    "Mixtral",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    NORMS,
)
FAMILIES["dots1"] = (
    "Dots1",
    {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "max_window_layers": 3,
        "rms_norm_eps": 1e-5,
    },
    FAMILIES["ernie4_5-moe"][2],
)
FAMILIES["minimax-m2"] = (
    "MiniMaxM2",
    {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    NORMS,
)
FAMILIES["hunyuan-moe"] = (
    "HunYuanMoEV1",
    {"num_experts": 5, "moe_topk": 2, "head_dim": 16},
    {
        "post_attention_layernorm": "ffn_norm",
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{key}": name for key, name in SHARED.items()},
    },
)
FAMILIES["afmoe"] = (
    "Afmoe",
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 6,
        "route_scale": 1.5,
        "mup_enabled": True,
        "rms_norm_eps": 1e-5,
    },
    {
        **FAMILIES["glm4moe"][2],
        "self_attn.gate_proj": "attn_gate",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.router.gate": "ffn_gate_inp",
    },
)
FAMILIES["exaone-moe"] = (
    "ExaoneMoe",
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 4,
        "routed_scaling_factor": 1.5,
    },
    FAMILIES["ernie4_5-moe"][2],
)
FAMILIES["phimoe"] = (
    "Phimoe",
    {
        "num_local_experts": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "original_max_position_embeddings": 256,
    },
    {**NORMS, "mlp.router": "ffn_gate_inp"},
)
FAMILIES["mellum"] = (
    "Mellum",
    {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    NORMS,
)
FAMILIES["hy_v3"] = (
    "HYV3",
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "head_dim": 16,
        "router_scaling_factor": 1.5,
    },
    FAMILIES["ernie4_5-moe"][2],
)
FAMILIES["mimo2"] = (
    "MiMoV2Flash",
    {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "num_key_value_heads": 1,
        "head_dim": 32,
        "v_head_dim": 16,
        "sliding_window": 6,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5000.0), ("sliding_attention", 500.0))
        },
    },
    FAMILIES["ernie4_5-moe"][2],
)
FAMILIES["laguna"] = (
    "Laguna",
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "sliding_window": 6,
        "head_dim": 16,
        "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    {**FAMILIES["ernie4_5-moe"][2], "self_attn.g_proj": "attn_gate"},
)
FAMILIES["cohere2moe"] = (
    "Cohere2Moe",
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "prefix_dense_intermediate_size": 56,
        "num_shared_experts": 2,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "expert_selection_fn": "sigmoid",
        "sliding_window": 6,
        "head_dim": 16,
        "logit_scale": 0.5,
        "rope_theta": 5000.0,
    },
    FAMILIES["ernie4_5-moe"][2],
)
FAMILIES["minimax-m3"] = (
    "MiniMaxM3VL",
    {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "dense_intermediate_size": 56,
        "shared_intermediate_size": 24,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "rotary_dim": 8,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 7.0,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 16,
        "index_topk_blocks": 8,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    {
        **FAMILIES["ernie4_5-moe"][2],
        **{
            f"self_attn.indexer.{part}_{kind}": f"indexer.{part}_{kind}"
            for part in "qk"
            for kind in ("proj", "norm")
        },
    },
)
#: Keys of single architectures, in place of the usual ones.
METADATA: dict[str, dict[str, Any]] = {
    "laguna": {
        "attention.head_count": [4, 6, 6, 6],
        "attention.sliding_window": 6,
        "expert_shared_feed_forward_length": 40,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 8,
        "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 500.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "cohere2moe": {
        "feed_forward_length": 56,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [False, *[True] * 3, False],
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 48,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "logit_scale": 0.5,
        "rope.dimension_count": 16,
        "rope.scaling.type": "none",
    },
    "minimax-m3": {
        "feed_forward_length": 56,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": 8,
        "attention.indexer.top_k": 8,
        "attention.indexer.block_size": 16,
        "attention.indexer.local_blocks": 1,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 8,
    },
}
#: Architectures whose files have norms with 1 added.
ONE_ADDED = ("minimax-m3",)
COMMON = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.norm.bias": "output_norm.bias",
}


def write(
    path: Path,
    architecture: str,
    model: Any,
    dropped: str = "",
    nextn: Mapping[str, np.ndarray] = MappingProxyType({}),
    has_further: bool = True,
) -> Path:
    """Write a model of `transformers`; without the tensor `dropped`, with the tensors `nextn` of a
    layer that predicts further tokens, which GLM has unless not `has_further`."""
    config, names = model.config, {**COMMON, **FAMILIES[architecture][2]}
    num_extra = int(architecture == "glm4moe" and has_further)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers + num_extra,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // 4,
        "value_dim": getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or 12,
        "rms_norm_eps": config.rms_norm_eps,
    }
    if architecture == "cohere2moe":
        del sizes["rms_norm_eps"]
    if architecture == "mimo2":
        is_sliding = [kind[0] == "s" for kind in config.layer_types]
        sizes["num_key_value_heads"] = [1 + has_window for has_window in is_sliding]
    writer = start_writer(path / "tiny.gguf", architecture, sizes)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    is_named_local = hasattr(config, "num_local_experts")
    writer.add_expert_count(config.num_local_experts if is_named_local else config.num_experts)
    is_hunyuan = architecture == "hunyuan-moe"
    writer.add_expert_used_count(config.moe_topk if is_hunyuan else config.num_experts_per_tok)
    if architecture not in ("olmoe", "llama", "phimoe"):
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(inner)
    if is_hunyuan:
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if architecture == "qwen3vlmoe":
        writer.add_rope_dimension_sections([3, 3, 2, 0])
    if architecture == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_rope_dimension_count(sizes["head_dim"] // 2)
    if architecture in ("mellum", "mimo2"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind[0] == "s" for kind in config.layer_types])
    if architecture == "mellum":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "mimo2":
        writer.add_rope_dimension_count(sizes["head_dim"] // 2)
        writer.add_float32("mimo2.rope.freq_base_swa", 500.0)
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
        writer.add_nextn_predict_layers(0)
    if architecture == "hy_v3":
        inner = config.num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(inner)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.router_scaling_factor)
        writer.add_expert_weights_norm(True)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "ernie4_5-moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // 2)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if architecture == "phimoe":
        writer.add_sliding_window(0)
        writer.add_rope_dimension_count(sizes["head_dim"])
        writer.add_rope_scaling_orig_ctx_len(256)
    if architecture == "exaone-moe":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind[0] == "s" for kind in config.layer_types])
        writer.add_nextn_predict_layers(0)
        inner = config.num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(inner)
    if architecture in ("glm4moe", "dots1", "exaone-moe"):
        is_exaone = architecture == "exaone-moe"
        shared = config.num_shared_experts if is_exaone else config.n_shared_experts
        writer.add_expert_shared_count(shared)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if architecture == "afmoe":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.route_scale)
        writer.add_expert_weights_norm(True)
    if architecture == "glm4moe":
        writer.add_nextn_predict_layers(num_extra)
        writer.add_rope_dimension_count(sizes["head_dim"] // 2)
        last = config.num_hidden_layers
        rest = {"unknown.weight": np.zeros(3, np.float32)}
        incomplete = {"attn_norm.weight": np.zeros(48, np.float32), **rest}
        for name, tensor in (nextn or incomplete).items() if num_extra else ():
            writer.add_tensor(f"blk.{last}.{name}", tensor)

    add_metadata(writer, architecture, METADATA.get(architecture, {}))

    def add(name: str, tensor: np.ndarray) -> None:
        if name != dropped:
            writer.add_tensor(name, np.ascontiguousarray(tensor))

    for name, parameter in model.state_dict().items():
        tensor = parameter.numpy()
        if architecture in ONE_ADDED and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name in OUTER:
            add(OUTER[name], tensor)
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            half = tensor.shape[1] // 2
            add(f"blk.{layer}.ffn_gate_exps.weight", tensor[:, :half])
            add(f"blk.{layer}.ffn_up_exps.weight", tensor[:, half:])
        elif rest.endswith("gate_up_proj.weight"):
            module = rest.removesuffix("gate_up_proj.weight")
            for part, half in zip(("gate", "up"), np.split(tensor, 2), strict=True):
                add(f"blk.{layer}.{names[f'{module}{part}_proj']}.weight", half)
        elif rest == "mlp.experts.down_proj":
            add(f"blk.{layer}.ffn_down_exps.weight", tensor)
        elif rest == "self_attn.sinks":
            add(f"blk.{layer}.attn_sinks.weight", tensor)
        elif rest.endswith(("e_score_correction_bias", "expert_bias")):
            leaf = "" if architecture == "hy_v3" else ".bias"
            add(f"blk.{layer}.exp_probs_b{leaf}", tensor)
        else:
            module, leaf = rest.rsplit(".", 1)
            if architecture == "llama" and module[-6:] in ("q_proj", "k_proj"):
                kind = "attention" if module.endswith("q_proj") else "key_value"
                tensor = interleave(tensor, sizes[f"num_{kind}_heads"])
            add(f"blk.{layer}.{names[module]}.{leaf}", tensor.squeeze())
    finish(writer)
    return path / "tiny.gguf"


#: Why llama.cpp computes another model.
NOT_OF_LLAMA_CPP = {"phimoe": "it has RMS norms and softmax routing in its place"}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_match_transformers(architecture: str, tmp_path: Path) -> None:
    family, settings, _ = FAMILIES[architecture]
    model = hf_model(family, **settings)
    path = write(tmp_path, architecture, model)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("architecture", [one for one in FAMILIES if one not in NOT_OF_LLAMA_CPP])
def test_logits_equal_those_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    family, settings, _ = FAMILIES[architecture]
    if architecture in ("olmoe", "dots1"):  # it has as many heads of keys as of queries there
        settings = {**settings, "num_key_value_heads": 4}
    path = write(tmp_path, architecture, hf_model(family, **settings), has_further=False)
    expected = llama_cpp_logits(path, TOKENS)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - expected).max() < 1e-4


def test_a_layer_that_predicts_further_tokens_is_read(tmp_path: Path) -> None:
    """As in the layout of safetensors: the third layer of a model is that of a module."""
    family, settings, _ = FAMILIES["glm4moe"]
    model = hf_model(family, **settings)
    model.config.num_hidden_layers = 2
    random = np.random.default_rng(0)
    size = model.config.hidden_size
    module = {
        "enorm": random.random(size, np.float32),
        "hnorm": random.random(size, np.float32),
        "eh_proj": random.random((size, 2 * size), np.float32),
        "shared_head.norm": random.random(size, np.float32),
        "shared_head.head": random.random((model.config.vocab_size, size), np.float32),
    }
    nextn = {f"nextn.{k.replace('.', '_')}.weight": tensor for k, tensor in module.items()}
    opened = load_checkpoint(write(tmp_path, "glm4moe", model, nextn=nextn))
    expected = checkpoint_of(model, num_nextn_predict_layers=1)
    expected.tensors = {
        **expected.tensors,
        **{f"model.layers.2.{name}.weight": tensor for name, tensor in module.items()},
    }
    assert has_mtp(opened)
    one, two = (load_mtp(x, load_network(x)) for x in (expected, opened))
    for a, b in zip(one.matrices(), two.matrices(), strict=True):
        assert np.array_equal(a.data, b.data)
    assert one.weights.states is not None and two.weights.states is not None
    assert np.array_equal(one.weights.states.state_norm, two.weights.states.state_norm)
    assert np.array_equal(one.weights.final_norm, two.weights.final_norm)


@pytest.mark.parametrize(
    ("architecture", "dropped", "missing"),
    [
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", "shared_expert_gate.weight"),
        ("qwen2moe", "blk.1.ffn_up_shexp.weight", "shared_expert.up_proj.weight"),
        ("qwen2moe", "blk.2.attn_k.bias", "self_attn.k_proj.bias"),
        ("olmoe", "blk.1.attn_q_norm.weight", "self_attn.q_norm.weight"),
        ("ernie4_5-moe", "blk.1.ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        ("glm4moe", "blk.1.exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("glm4moe", "blk.0.ffn_up.weight", "mlp.up_proj.weight"),
        ("glm4moe", "blk.2.ffn_down_exps.weight", "mlp.experts.0.down_proj.weight"),
        ("dots1", "blk.1.exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("minimax-m2", "blk.1.exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("hunyuan-moe", "blk.1.ffn_up_shexp.weight", "shared_mlp.up_proj.weight"),
        ("hy_v3", "blk.1.exp_probs_b", "mlp.gate.e_score_correction_bias"),
        ("mimo2", "blk.2.attn_sinks.weight", "self_attn.sinks"),
        ("mimo2", "blk.1.attn_v.weight", "self_attn.v_proj.weight"),
    ],
)
def test_missing_tensors_are_named(
    architecture: str, dropped: str, missing: str, tmp_path: Path
) -> None:
    family, settings, _ = FAMILIES[architecture]
    path = write(tmp_path, architecture, hf_model(family, **settings), dropped)
    with pytest.raises(CheckpointError, match=f"the tensor for '.*{missing}' is missing"):
        load_checkpoint(path)

"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them, against the
same models in `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.mtp import has_mtp, load_mtp
from anydecode.models.opening import choose_executor
from anydecode.quantization.gguf import quantize_file
from gguf_models import (
    finish,
    interleave,
    rewrite,
    tensor_names,
    usual_metadata,
    writer_with,
)
from hybrid_configs import FALCON_H1, NEMOTRON_H
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TOKENS = [(7 * i + 3) % 131 for i in range(24)]
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}


@dataclass
class Case:
    """A model of `transformers` and its GGUF file; `metadata` are the keys beside the usual."""

    family: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


GRANITE: dict[str, Any] = {
    "shared_intermediate_size": 80,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
GRANITE_METADATA: dict[str, Any] = {
    "attention.scale": 0.3,
    "embedding_scale": 2.0,
    "residual_scale": 0.6,
    "logit_scale": 1.5,
}
GRANITE_4: dict[str, Any] = {
    **GRANITE,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
GRANITE_4_METADATA: dict[str, Any] = {
    **GRANITE_METADATA,
    **SSM,
    "attention.head_count_kv": [0, 2, 0],
    "rope.scaling.finetuned": False,
}
EXPERTS = {"expert_count": 5, "expert_used_count": 2}
GATED_DELTA: dict[str, Any] = {
    # With the usual eps, the outputs of a recurrence are small before their norm.
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
GATED_DELTA_METADATA: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
    "full_attention_interval": 4,
    "rope.dimension_count": 4,
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN_EXPERTS_METADATA: dict[str, Any] = {
    **EXPERTS,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
#: MRoPE, whose sections do not matter for texts.
SECTIONS = {"rope.dimension_sections": [1, 1, 0, 0]}
JAMBA: dict[str, Any] = {
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "rms_norm_eps": 1e-3,
}
JAMBA_METADATA: dict[str, Any] = {
    **EXPERTS,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 3,
    "attention.head_count_kv": [0, 2, 0, 0],
    "rope.freq_base": None,
}
FALCON_H1_METADATA = {**SSM, "ssm.inner_size": 64, "ssm.time_step_rank": 4}
NEMOTRON_METADATA: dict[str, Any] = {
    **SSM,
    "ssm.inner_size": 72,
    "ssm.time_step_rank": 6,
    "feed_forward_length": [0, 80, 0, 80],
    "attention.head_count_kv": [0, 0, 2, 0],
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": None,
}
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
NEMOTRON_MOE_METADATA: dict[str, Any] = {
    **NEMOTRON_METADATA,
    **EXPERTS,
    "feed_forward_length": [0, 24, 0, 24],
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_group_count": 1,
}
NO_ATTENTION: dict[str, Any] = {
    "context_length": 1 << 20,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.freq_base": None,
}
LFM2_MOE: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LFM2_MOE_METADATA: dict[str, Any] = {
    **EXPERTS,
    "expert_feed_forward_length": 24,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
    "shortconv.l_cache": 3,
    "attention.head_count_kv": [0, 2, 0],
}
KIMI_LINEAR: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
KIMI_METADATA: dict[str, Any] = {
    **EXPERTS,
    "context_length": 256,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "leading_dense_block_count": 1,
    "attention.head_count_kv": [0, 0, 0, 0, 1],
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 18,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 16,
}
LING_3: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "layer_group_size": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kda_lower_bound": -3.0,
}
LING_METADATA: dict[str, Any] = {
    **KIMI_METADATA,
    "attention.head_count_kv": [0, 0, 0, 1],
    "attention.value_length": None,
    "expert_shared_feed_forward_length": 24,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -3.0,
    "nextn_predict_layers": 0,
}
#: GLM-5.3, with the numbers of streams and of the indexer's key that llama.cpp requires.
GLM_5_NEXT: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", *["indexed_attention"] * 3],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_topk": 8,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "linear_lower_bound": -3.0,
    "swiglu_limit": 0.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
}
GLM_METADATA: dict[str, Any] = {
    **KIMI_METADATA,
    "attention.head_count_kv": [0, 1, 1, 1],
    "attention.layer_norm_epsilon": 1e-6,
    "attention.q_lora_rank": 20,
    "attention.key_length": 24,
    "attention.key_length_mla": 10,
    "rope.dimension_count": 0,
    "kda.gate_lower_bound": -3.0,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 8,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.types": [True, True, False, True],
    "swiglu_clamp_exp": [0.5] * 4,
    "swiglu_clamp_shexp": [0.5] * 4,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 4,
    "hyper_connection.epsilon": 1e-6,
}
#: Qwen3.8. The tokens of the tests have the one that ends a text.
QWEN_4_EXP: dict[str, Any] = {
    **GATED_DELTA,
    **QWEN_EXPERTS,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [3],
    "ple_embed_dim": 48,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 60,
    "make_ngram_vocab_size_divisible_by": 8,
    "eos_token_id": 31,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
    "output_gate_type": "sigmoid",
}
QWEN_4_METADATA: dict[str, Any] = {
    **GATED_DELTA_METADATA,
    **QWEN_EXPERTS_METADATA,
    **SECTIONS,
    "full_attention_interval": 2,
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 12,
    "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 6,
    "attention.compress_ratios": [0, 3, 0, 3],
    "ple.layers": [2],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 3,
    "ple.eos_token_id": 31,
    "embedding_length_per_layer_input": 12,
}
#: The constants of hashes of n-grams, and their keys in files.
HASHES = {
    "layer_multipliers": "ple.layer_multipliers",
    "ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    "ngram_heads_offsets": "ple.head_offsets",
}
#: Parts of layers of Qwen3.8, and their names in files.
QWEN_4_NAMES = {
    **{
        f"{own}_hyper_connection.{name}": f"hc_{part}_{kind}"
        for part, own in (("attn", "attn"), ("ffn", "mlp"))
        for kind, name in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")},
    "ple.conv1d": "ple_conv1d",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
}
#: The indexer of GLM-5.3, by the names of `transformers`.
GLM_INDEXER = {
    "wq_b.weight": "indexer.attn_q_b.weight",
    "wk.weight": "indexer.attn_k.weight",
    "k_norm.weight": "indexer.k_norm.weight",
    "k_norm.bias": "indexer.k_norm.bias",
    "weights_proj.weight": "indexer.proj.weight",
    "index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "index_kpool_compress_ape": "indexer_compressor_ape.weight",
}
#: Architectures that the package does not know, and those whose names of tensors they have.
NAMED_AS = {
    "bailingmoe3": "kimi-linear",
    "glm5-next": "kimi-linear",
    "qwen4exp": "qwen35moe",
}
CASES = {
    "granite hybrid": Case("GraniteMoeHybrid", "granitehybrid", GRANITE_4, GRANITE_4_METADATA),
    "granite hybrid experts": Case(
        "GraniteMoeHybrid",
        "granitehybrid",
        {
            **GRANITE_4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 72,
            "tie_word_embeddings": True,
        },
        {**GRANITE_4_METADATA, **EXPERTS, "expert_shared_feed_forward_length": 72},
    ),
    "granite hybrid rope": Case(
        "GraniteMoeHybrid",
        "granitehybrid",
        {**GRANITE_4, "position_embedding_type": "rope"},
        {**GRANITE_4_METADATA, "rope.scaling.finetuned": None},  # the default is true
    ),
    "granite moe": Case(
        "GraniteMoe",
        "granitemoe",
        {
            **{key: value for key, value in GRANITE.items() if "shared" not in key},
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        {**GRANITE_METADATA, **EXPERTS},
    ),
    "granite moe shared": Case(
        "GraniteMoeShared",
        "granitemoe",
        {
            **GRANITE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 72,
        },
        {**GRANITE_METADATA, **EXPERTS, "expert_shared_feed_forward_length": 72},
    ),
    "falcon h1": Case(
        "FalconH1", "falcon-h1", {**FALCON_H1, "mamba_rms_norm": False}, FALCON_H1_METADATA
    ),
    "falcon h1 norm": Case(
        "FalconH1",
        "falcon-h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        FALCON_H1_METADATA,
    ),
    "nemotron h": Case("NemotronH", "nemotron_h", NEMOTRON_H, NEMOTRON_METADATA),
    "nemotron h moe": Case(
        "NemotronH",
        "nemotron_h_moe",
        {**NEMOTRON_H, **NEMOTRON_EXPERTS},
        NEMOTRON_MOE_METADATA,
    ),
    "nemotron h moe latent": Case(
        "NemotronH",
        "nemotron_h_moe",
        {**NEMOTRON_H, **NEMOTRON_EXPERTS, "moe_latent_size": 20, "norm_topk_prob": False},
        {**NEMOTRON_MOE_METADATA, "moe_latent_size": 20, "expert_weights_norm": False},
    ),
    "mamba2": Case(
        "Mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2},
        {**SSM, **NO_ATTENTION},
    ),
    "mamba2 odd": Case(
        "Mamba2",
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 12,
            "state_size": 16,
            "n_groups": 1,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        },
        {**SSM, **NO_ATTENTION, "ssm.conv_kernel": 3, "ssm.group_count": 1},
    ),
    "qwen3 next": Case(
        "Qwen3Next",
        "qwen3next",
        {**GATED_DELTA, **QWEN_EXPERTS},
        {**GATED_DELTA_METADATA, **QWEN_EXPERTS_METADATA},
    ),
    "qwen3.5": Case("Qwen3_5", "qwen35", GATED_DELTA, {**GATED_DELTA_METADATA, **SECTIONS}),
    "qwen3.5 moe": Case(
        "Qwen3_5Moe",
        "qwen35moe",
        {**GATED_DELTA, **QWEN_EXPERTS, "full_attention_interval": 2},
        {
            **GATED_DELTA_METADATA,
            **QWEN_EXPERTS_METADATA,
            **SECTIONS,
            "full_attention_interval": 2,
        },
    ),
    "jamba": Case("Jamba", "jamba", JAMBA, JAMBA_METADATA),
    "jamba dense": Case(
        "Jamba",
        "jamba",
        {**JAMBA, "num_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        {**JAMBA_METADATA, "expert_count": 1, "expert_used_count": 1},
    ),
    "lfm2 moe": Case("Lfm2Moe", "lfm2moe", LFM2_MOE, LFM2_MOE_METADATA),
    "kimi linear": Case("KimiLinear", "kimi-linear", KIMI_LINEAR, KIMI_METADATA),
    "ling 3": Case("BailingHybrid", "bailingmoe3", LING_3, LING_METADATA),
    "glm 5.3": Case("Glm5Next", "glm5-next", GLM_5_NEXT, GLM_METADATA),
    "qwen 3.8": Case("Qwen4Exp", "qwen4exp", QWEN_4_EXP, QWEN_4_METADATA),
}
#: Names of `transformers` and those of the checkpoints from which the converter starts.
RENAMED = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "mlp.experts.down_proj": "mlp.experts.down_proj.weight",
    "feed_forward.experts.down_proj": "feed_forward.experts.w2.weight",
    "feed_forward.expert_bias": "feed_forward.expert_bias.bias",
    "mixer.gate.e_score_correction_bias": "mixer.gate.e_score_correction.bias",
    "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias",
    "mixer.experts.up_proj": "mlp.experts.up_proj.weight",
    "mixer.experts.down_proj": "mlp.experts.down_proj.weight",
}
#: Matrices that are stored as two.
HALVES = {
    "block_sparse_moe.experts.gate_up_proj": "_exps",
    "mlp.experts.gate_up_proj": "_exps",
    "feed_forward.experts.gate_up_proj": "_exps",
    "shared_mlp.input_linear.weight": "",
}


def converted(
    model: Any, case: Case, path: Path, extra: dict[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """Write the model of a case, and tensors `extra`, as a GGUF file; `changes` replace or remove
    (None) metadata."""
    config = checkpoint_of(model).config
    num_layers = model.config.num_hidden_layers
    hashes = {
        HASHES[leaf]: buffer.numpy()
        for name, buffer in model.named_buffers()
        if (leaf := name.rpartition(".")[2]) in HASHES
    }
    metadata = {**usual_metadata(config, num_layers), **hashes, **case.metadata, **changes}
    writer = writer_with(path, case.architecture, metadata, config["vocab_size"])
    known = NAMED_AS.get(case.architecture, case.architecture)
    names = tensor_names(known, metadata["block_count"])
    is_tied = config.get("tie_word_embeddings")
    tensors = {name: parameter.numpy() for name, parameter in model.state_dict().items()}
    for name, original_tensor in {**tensors, **(extra or {})}.items():
        if name == "lm_head.weight" and is_tied:
            continue
        for stored, tensor in prepared(case, config, name, original_tensor):
            target = names.get_name(stored, try_suffixes=(".weight", ".bias")) or stored
            assert not target.startswith(("model.", "backbone.")), stored
            writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
    finish(writer)
    return path


def prepared(
    case: Case, config: dict[str, Any], name: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that the converter makes of one, by the names of checkpoints or of GGUF."""
    start, _, rest = name.partition(".layers.")
    layer, _, part = rest.partition(".")
    if case.family == "NemotronH":
        start = start.replace("model", "backbone")
        name = name.replace("model.", "backbone.", 1)
    if case.family == "FalconH1":
        tensor = multiplied(config, name, tensor)
    if case.family == "Qwen4Exp":
        own = of_qwen_4(config, name, layer, part, tensor)
        if own is not None:
            yield from own.items()
            return
    if case.family.startswith("Qwen"):
        tensor = in_qwen_order(case, config, part, tensor)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
    if case.family.startswith("Granite") and part[-13:] in ("q_proj.weight", "k_proj.weight"):
        key = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
        tensor = interleave(tensor, config[key])
    if part in HALVES:
        gate, up = np.split(tensor, 2, axis=-2)
        is_dense = part.startswith("shared_mlp") and not config.get("num_local_experts")
        suffix = HALVES[part] or ("" if is_dense else "_shexp")
        yield f"blk.{layer}.ffn_gate{suffix}.weight", gate
        yield f"blk.{layer}.ffn_up{suffix}.weight", up
        return
    if part == "shared_mlp.output_linear.weight" and not config.get("num_local_experts"):
        yield f"blk.{layer}.ffn_down.weight", tensor
        return
    if part == "linear_attn.in_proj_qkvz.weight":
        yield from separate(config, layer, tensor)
        return
    if part.endswith("A_log"):
        tensor = -np.exp(tensor)
    if case.family == "BailingHybrid" and layer:
        yield from of_ling(config, layer, part.replace(".forget_gate", ""), tensor)
        return
    if case.family == "Glm5Next" and layer:
        yield from of_glm(config, layer, part.replace(".forget_gate", ""), tensor)
        return
    if case.family == "KimiLinear" and layer:
        yield from of_kimi(config, layer, part.replace(".forget_gate", ""), tensor)
        return
    is_plain = "linear_attn" in part or case.family == "Jamba"
    has_columns = not is_plain and part.endswith((".A_log", ".D"))
    if has_columns:
        tensor = tensor[:, None]
    if part in ("mamba.norm.weight", "mixer.norm.weight"):
        tensor = tensor.reshape(case.metadata["ssm.group_count"], -1)
    if "conv" in part and tensor.ndim == 3:
        tensor = tensor.squeeze(1)
    if part.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    part = RENAMED.get(part, part)
    if part.endswith(".dt_bias"):
        part = part.replace(".dt_bias", ".dt_proj.bias")
    if part.startswith("feed_forward.experts"):
        start = ""
    if part.startswith("mlp.experts"):
        start = "model"
    yield f"{start}.layers.{layer}.{part}".lstrip(".") if layer else name, tensor


def of_kimi(
    config: dict[str, Any], layer: str, part: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Kimi Linear: convolutions by themselves, and keys and values of heads as two stacks."""
    if part == "self_attn.conv1d.weight":
        for name, kernel in zip("qkv", np.split(tensor, 3), strict=True):
            yield f"blk.{layer}.ssm_conv1d_{name}.weight", kernel[None]
        return
    if part == "self_attn.kv_b_proj.weight":
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        size = config["qk_nope_head_dim"]
        yield f"blk.{layer}.attn_k_b.weight", heads[:, :size].swapaxes(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", heads[:, size:]
        return
    part = RENAMED.get(part, part).replace(".dt_bias", ".dt_proj.bias")
    yield f"model.layers.{layer}.{part}", tensor


def of_qwen_4(
    config: dict[str, Any], name: str, layer: str, part: str, tensor: np.ndarray
) -> dict[str, np.ndarray] | None:
    """The parts of Qwen3.8 that Qwen3.5 does not have; None: it has this one."""
    module, _, leaf = part.rpartition(".")
    own = QWEN_4_NAMES.get(module)
    if leaf in HASHES:
        return {}
    if module.endswith("ngram_embedding"):
        return {"per_layer_token_embd.weight": tensor}
    if name.startswith("model.hyper_connection_mixer."):
        kind = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
        end = kind[name.split(".")[2]]
        return {f"output_hc_{end}.weight": tensor + (end == "norm")}
    if part == "self_attn.indexer.index_qk_proj.weight":
        rows = config["indexer_n_heads"] * config["indexer_head_dim"]
        start = f"blk.{layer}.indexer"
        return {f"{start}.q_proj.weight": tensor[:rows], f"{start}.k_proj.weight": tensor[rows:]}
    if own is None:
        return None
    tensor = tensor + (tensor.ndim == 1)  # norms
    return {f"blk.{layer}.{own}.weight": tensor.squeeze(1) if tensor.ndim == 3 else tensor}


def of_glm(
    config: dict[str, Any], layer: str, part: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """GLM-5.3: as Kimi Linear, with an indexer and hyper-connections."""
    module, _, leaf = part.rpartition(".")
    _, _, own = part.partition("self_attn.indexer.")
    if own:
        yield f"blk.{layer}.{GLM_INDEXER[own]}", tensor
    elif module.endswith("_hc"):
        yield f"blk.{layer}.hc_{module.removesuffix('_hc')}_{leaf}.weight", tensor
    elif ".q_a_" in part or ".q_b_" in part:
        name = {"q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b"}
        yield f"blk.{layer}.attn_{name[module.rpartition('.')[2]]}.weight", tensor
    else:
        yield from of_kimi(config, layer, part, tensor)


def of_ling(
    config: dict[str, Any], layer: str, part: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Ling 3: as Kimi Linear, but for the sign of decays, and for gates of full rank."""
    is_full = config["layer_types"][int(layer)] == "full_attention"
    if part == "self_attn.A_log":
        yield f"blk.{layer}.ssm_a", -tensor[:, None]
    elif part == "self_attn.f_proj.weight":
        yield f"blk.{layer}.ssm_f_a.weight", tensor
    elif part == "self_attn.g_proj.weight":
        yield f"blk.{layer}.{'attn_gate' if is_full else 'ssm_g_a'}.weight", tensor
    else:
        yield from of_kimi(config, layer, part, tensor)


def multiplied(config: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Falcon-H1: a weight times its factor."""
    inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    if name.endswith("mamba.in_proj.weight"):
        sizes = [inner, inner, keys, keys, config["mamba_n_heads"]]
        factors = np.repeat(np.float32(config["ssm_multipliers"]), sizes)
        return tensor * factors[:, None] * config["ssm_in_multiplier"]
    before, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    for part, factor in (
        ("down_proj", down),
        ("gate_proj", gate),
        ("k_proj", before * config["key_multiplier"]),
        ("q_proj", before),
        ("v_proj", before),
        ("o_proj", config["attention_out_multiplier"]),
        ("mamba.out_proj", config["ssm_out_multiplier"]),
        ("lm_head", config["lm_head_multiplier"]),
        ("embed_tokens", config["embedding_multiplier"]),
    ):
        if part in name:
            return tensor * factor
    return tensor


def in_qwen_order(case: Case, config: dict[str, Any], part: str, tensor: np.ndarray) -> np.ndarray:
    """Qwen3.5: value heads in the order in which ggml repeats key heads."""
    if case.family == "Qwen3Next" or "linear_attn" not in part or part.endswith("norm.weight"):
        return tensor
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head_dim = config["linear_value_head_dim"]
    is_small = part.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"))
    size = 1 if is_small else head_dim
    order = np.arange(heads * size).reshape(groups, -1, size).swapaxes(0, 1).ravel()
    if part.endswith("out_proj.weight"):
        return tensor[:, order]
    first = len(tensor) - len(order)  # queries and keys come before
    return np.concatenate([tensor[:first], tensor[first:][order]])


def separate(
    config: dict[str, Any], layer: str, tensor: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Qwen3-Next: queries, keys, values and gates, which are stored per key head."""
    groups, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    parts = np.split(tensor.reshape(groups, -1, 48), [size, 2 * size, 2 * size + values], axis=1)
    query, key, value, gate = (part.reshape(-1, 48) for part in parts)
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate([query, key, value])
    yield f"blk.{layer}.attn_gate.weight", gate


@cache
def original_of(name: str) -> Any:
    return original(CASES[name])


def original(case: Case) -> Any:
    return hf_model(case.family, **{"rope_parameters": dict(ROPE), **case.settings})


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = original_of(name)
    checkpoint = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf"))
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


#: Why llama.cpp does not open a file.
NOT_OF_LLAMA_CPP = {"mamba2 odd": "it requires a bias of the convolution"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_OF_LLAMA_CPP])
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    has_delta_rule = case.family.startswith(("Qwen", "Kimi", "Bailing", "Glm5"))
    if has_delta_rule:
        # Where it divides keys and queries by their norms, it has the eps of the model's norms.
        case = replace(case, settings={**case.settings, "rms_norm_eps": 1e-6})
    path = converted(original(case), case, tmp_path / "tiny.gguf")
    expected = llama_cpp_logits(path, TOKENS)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - expected).max() < (5e-4 if has_delta_rule else 1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3 next", "qwen3.5", "granite hybrid experts", "nemotron h moe latent"),
        *("kimi linear", "ling 3", "glm 5.3", "qwen 3.8"),
    ],
)
def test_native_kernels_agree(name: str, tmp_path: Path) -> None:
    """Value heads of Qwen3.5 take key heads in another order than those of Qwen3-Next."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    case = CASES[name]
    model = original_of(name)
    checkpoint = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf"))
    found = logits(built(checkpoint, executor=choose_executor("native")), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 2e-4


def test_old_files_of_qwen3_next_have_one_matrix_of_inputs(tmp_path: Path) -> None:
    case = CASES["qwen3 next"]
    model = original(case)
    whole = load_checkpoint(converted(model, case, tmp_path / "new.gguf"))
    monolith = {
        f"blk.{name.split('.')[2]}.ssm_in.weight": tensor.numpy()
        for name, tensor in model.state_dict().items()
        if name.endswith("in_proj_qkvz.weight")
    }
    path = tmp_path / "old.gguf"
    converted(model, case, path, monolith)
    parts = ("attn_qkv", "attn_gate")
    rewrite(path, [f"blk.{layer}.{part}.weight" for layer in range(4) for part in parts])
    old = load_checkpoint(path)
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in old.tensors
    assert "model.layers.0.linear_attn.in_proj_z.weight" not in old.tensors
    found, expected = (logits(built(x), chain(TOKENS)) for x in (old, whole))
    assert np.array_equal(found, expected)


def test_the_block_of_nemotron_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    case = CASES["nemotron h moe"]
    model = original_of("nemotron h moe")
    extra = {
        f"blk.4.{name}.weight": np.ones(48, np.float32)
        for name in ("attn_norm", "ffn_norm", "nextn.enorm")
    }
    changes = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "feed_forward_length": [0, 24, 0, 24, 24],
        "attention.head_count_kv": [0, 0, 2, 0, 2],
    }
    opened = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf", extra, **changes))
    assert not has_mtp(opened)
    found = logits(built(opened), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3 next"])
def test_the_module_of_qwen_that_predicts_further_tokens_is_read(name: str, tmp_path: Path) -> None:
    """As in the layout of safetensors."""
    case = CASES[name]
    model = original(case)
    random, size = np.random.default_rng(0), model.config.hidden_size
    layer = {
        name.removeprefix("model.layers.3."): random.random(tensor.shape, np.float32)
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.3.")
    }
    norms = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    norms["norm"] = "shared_head_norm"
    projection = random.random((size, 2 * size), np.float32)
    module = {name: random.random(size, np.float32) for name in norms}
    extra = {f"model.layers.4.{name}": tensor for name, tensor in layer.items()}
    extra |= {f"blk.4.nextn.{name}.weight": module[key] for key, name in norms.items()}
    extra["blk.4.nextn.eh_proj.weight"] = projection
    path = tmp_path / "tiny.gguf"
    opened = load_checkpoint(
        converted(model, case, path, extra, block_count=5, nextn_predict_layers=1)
    )
    expected = checkpoint_of(model)
    expected.tensors = {
        **expected.tensors,
        **{f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()},
        **{f"mtp.{name}.weight": tensor for name, tensor in module.items()},
        "mtp.fc.weight": projection,
    }
    assert has_mtp(opened)
    found = logits(built(opened), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4
    one, two = (load_mtp(x, load_network(x)) for x in (expected, opened))
    for a, b in zip(one.matrices(), two.matrices(), strict=True):
        assert np.array_equal(a.data, b.data)
    assert one.weights.states is not None and two.weights.states is not None
    for a, b in (
        (one.weights.states.state_norm, two.weights.states.state_norm),
        (one.weights.states.embedding_norm, two.weights.states.embedding_norm),
        (one.weights.final_norm, two.weights.final_norm),
        (one.weights.layers[0].attention_norm, two.weights.layers[0].attention_norm),
    ):
        assert a is not None and b is not None and np.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["granite hybrid experts", "qwen3.5 moe", "lfm2 moe", "mamba2", "nemotron h moe latent"]
)
def test_quantised_files_keep_their_small_tensors(name: str, tmp_path: Path) -> None:
    """Convolutions, gates and routers stay; the other matrices stay packed."""
    case = CASES[name]
    sizes = {"hidden_size": 64, "shared_expert_intermediate_size": 64}
    changes: dict[str, Any] = {}
    if name == "mamba2":
        sizes, changes = {"hidden_size": 64, "head_dim": 16}, {"ssm.inner_size": 128}
    if name == "granite hybrid experts":
        changes = {"ssm.inner_size": 128}
    if name.startswith("nemotron"):
        sizes |= {"moe_latent_size": 32, "moe_shared_expert_intermediate_size": 32}
        changes = {"moe_latent_size": 32, "expert_shared_feed_forward_length": 32}
    if name == "qwen3.5 moe":
        changes = {"expert_shared_feed_forward_length": 64}
    if name != "qwen3.5 moe":
        sizes.pop("shared_expert_intermediate_size", None)
    # All experts are used, so that rounding does not choose others.
    if "expert_count" in case.metadata:
        sizes["num_experts_per_tok"] = changes["expert_used_count"] = 5
    case = Case(case.family, case.architecture, {**case.settings, **sizes}, case.metadata)
    model = original(case)
    quantize_file(
        converted(model, case, tmp_path / "tiny.gguf", **changes), tmp_path / "small.gguf", "q8_0"
    )
    checkpoint = load_checkpoint(tmp_path / "small.gguf")
    network = built(checkpoint)
    formats = {weight.format for weight in network.network.matrices()}
    assert "Q8_0" in formats
    found, expected = logits(network, chain(TOKENS)), hf_logits(model, TOKENS)
    assert 0 < np.abs(found - expected).mean() < 0.1 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite hybrid", {"attention.scale": 0.2}),
        ("granite hybrid", {"rope.scaling.finetuned": None}),
        ("granite hybrid experts", {"expert_used_count": 1}),
        ("granite hybrid rope", {"rope.scaling.finetuned": False}),
        ("granite moe", {"residual_scale": None}),
        ("granite moe", {"expert_used_count": 3}),
        ("nemotron h", {"attention.layer_norm_rms_epsilon": 0.1}),
        ("nemotron h moe", {"expert_weights_scale": 1.0}),
        ("nemotron h moe", {"expert_weights_norm": None}),
        ("qwen3 next", {"rope.dimension_count": None}),
        ("qwen3 next", {"expert_used_count": 1}),
        ("qwen3.5", {"rope.freq_base": 500.0}),
        ("lfm2 moe", {"expert_used_count": 1}),
        ("ling 3", {"kda.gate_lower_bound": -5.0}),
        ("ling 3", {"kda.safe_gate": False}),
        ("jamba", {"expert_used_count": 1}),
        ("jamba", {"attention.layer_norm_rms_epsilon": 0.1}),
        ("qwen 3.8", {"ple.eos_token_id": 5}),
        ("qwen 3.8", {"attention.indexer.top_k": 3}),
        ("qwen 3.8", {"attention.compress_ratios": [0, 2, 0, 2]}),
    ],
)
def test_every_key_changes_the_logits(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Negative controls: with one key changed or left out, the logits exceed the margin above."""
    case = CASES[name]
    model = original_of(name)
    checkpoint = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf", **change))
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granite hybrid", {"attention.head_count_kv": 2}, "head_count_kv is 2; allowed is a list"),
        ("granite hybrid", {"attention.head_count_kv": [0, 2, 2]}, "layers.2.self_attn.o_proj"),
        ("granite hybrid", {"attention.head_count_kv": [0, 0, 0]}, "head_count_kv is 0"),
        ("granite hybrid", {"ssm.time_step_rank": 7}, "time_step_rank is 7; allowed is a divisor"),
        ("granite hybrid", {"ssm.time_step_rank": 0}, "time_step_rank is 0"),
        ("granite hybrid", {"ssm.group_count": 3}, "num_groups is 3"),
        ("granite hybrid", {"ssm.group_count": 1}, "mamba.* has shape"),
        ("granite hybrid", {"ssm.state_size": None}, "ssm.state_size is missing"),
        ("granite hybrid", {"ssm.conv_kernel": 3}, "conv1d.weight.* has shape"),
        ("granite hybrid", {"rope.scaling.finetuned": 1}, "allowed is true or false"),
        ("granite hybrid rope", {"rope.dimension_count": 6}, "rotate in part"),
        ("granite hybrid experts", {"expert_used_count": 6}, "experts_per_token is 6"),
        ("granite hybrid experts", {"expert_count": 4}, "has 5 experts; expert_count is 4"),
        ("granite hybrid experts", {"expert_shared_feed_forward_length": 80}, "has shape"),
        ("granite moe", {"expert_used_count": None}, "expert_used_count is missing"),
        ("falcon h1", {"ssm.inner_size": 60}, "has shape"),
        ("nemotron h", {"feed_forward_length": [0, 80]}, "a list of 4 integers"),
        ("nemotron h", {"feed_forward_length": [0, 80, 0, 0]}, "layers.3.mamba"),
        ("nemotron h", {"feed_forward_length": [0, 80, 80, 80]}, "mixer.up_proj.* is missing"),
        ("nemotron h moe", {"expert_count": None}, "expert_count is missing"),
        ("nemotron h moe", {"expert_weights_norm": 1}, "allowed is true or false"),
        ("nemotron h moe", {"expert_weights_scale": -1.0}, "routed_scaling_factor|scale"),
        ("nemotron h moe", {"expert_group_count": 2}, "num_groups is 2"),
        ("nemotron h moe", {"expert_shared_feed_forward_length": 41}, "has shape"),
        ("nemotron h moe latent", {"moe_latent_size": 21}, "fc1_latent_proj.* has shape"),
        ("nemotron h moe latent", {"moe_latent_size": None}, "has shape"),
        ("mamba2", {"ssm.inner_size": None}, "ssm.inner_size is missing"),
        ("jamba", {"ssm.inner_size": 90}, "inner_size is 90; allowed is a multiple of embedding_l"),
        ("jamba", {"ssm.state_size": 8}, "has shape"),
        ("jamba", {"ssm.time_step_rank": 4}, "has shape"),
        ("jamba", {"attention.head_count_kv": 2}, "head_count_kv is 2; allowed is a list of 4"),
        ("jamba", {"attention.head_count_kv": [0, 2, 2, 0]}, "layers.2.self_attn.* is missing"),
        ("jamba", {"expert_count": 4}, "has 5 experts; expert_count is 4"),
        ("qwen3 next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3 next", {"full_attention_interval": 3}, "layers.2.self_attn.* is missing"),
        ("qwen3 next", {"attention.recurrent_layers": [True]}, "a list of 4 flags"),
        ("qwen3 next", {"ssm.time_step_rank": 4}, "num_groups|has shape"),
        ("qwen3 next", {"expert_feed_forward_length": None}, "is missing"),
        ("qwen3.5", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
        ("ling 3", {"kda.gate_lower_bound": None}, "kda.gate_lower_bound is missing"),
        ("ling 3", {"kda.gate_lower_bound": 1.0}, "kda_lower_bound is 1.0; allowed"),
        ("ling 3", {"kda.head_dim": 12}, "has shape"),
        ("ling 3", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
        ("lfm2 moe", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed is 2"),
        ("qwen 3.8", {"attention.compress_ratios": [0, 3, 0, 2]}, "allowed is one size"),
        ("qwen 3.8", {"hyper_connection.low_rank": 10}, "has shape"),
        ("qwen 3.8", {"ple.layers": [3]}, "ple.key_proj.* is missing"),
        ("qwen 3.8", {"ple.layer_multipliers": None}, "ple.layer_multipliers is missing"),
        ("qwen 3.8", {"ple.conv_kernel": 4}, "ple.conv1d.weight.* has shape"),
        ("lfm2 moe", {"leading_dense_block_count": 0}, "layers.0.mlp.gate.* is missing"),
    ],
)
def test_invalid_metadata_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    path = converted(original_of(name), case, tmp_path / "tiny.gguf", **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)

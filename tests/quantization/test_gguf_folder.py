"""Folders of safetensors that `anydecode quantize` writes as GGUF files, against `transformers` and
llama.cpp."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from anydecode import LLM
from anydecode.cli import main
from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.tokenizers import HFTokenizer
from anydecode.quantization import gguf_folder
from anydecode.quantization.gguf import quantize_file
from anydecode.quantization.gguf_folder import FolderFile
from anydecode.quantization.gguf_forms import FORMS
from encoder_models import declare_pooling
from gguf_models import write_folder
from hybrid_configs import FALCON_H1, NEMOTRON_H
from llama_cpp_logits import (
    GELU_MARGIN,
    llama_cpp_embedding,
    llama_cpp_logits,
    llama_cpp_tokens,
)
from plain_families import FAMILIES, config_of
from quantized_parts import CASES as LAYOUTS
from rwkv_models import CONFIG, paper_logits, rwkv_tensors
from tiny_models import built, chain, hf_logits, hf_model, logits
from tokenizer_files import MARKS, SPLITS, strings, trained, write_tokenizer

TOKENS = [(7 * i + 3) % 131 for i in range(24)]
VOCAB = 1000
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = [1.0 + 0.3 * i for i in range(6)]
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "intermediate_size": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
BESIDE_SHARED: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
MINISTRAL: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
#: Layouts of quantised matrices, and those whose blocks are GGUF's, without a factor or an order.
QUANTISED = (
    *("gptq", "gptq, order", "gptq 8 bits, order", "awq", "fp8 of Qwen3", "fp8 of Mistral"),
    *("mxfp4", "nvfp4", "bitsandbytes nf4", "packed int4", "int8", "modelopt fp8"),
)
KEPT = ("gptq", "awq", "mxfp4", "packed int4", "int8")
#: Of random models in Q8_0, by `mean_error`.
PACKED_ERROR = 0.2
#: Of Qwen3-Next and Qwen3.5, with the eps of norms that llama.cpp has for keys and queries.
GATED_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
QWEN_EXPERTS: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 64}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
GLM_LITE: dict[str, Any] = {
    **{
        key: LATENT[key]
        for key in LATENT
        if key not in ("first_k_dense_replace", "rope_parameters")
    },
    "rope_parameters": ROPE,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_group": 1,
    "topk_group": 1,
}
KIMI_LINEAR: dict[str, Any] = {
    **{key: LATENT[key] for key in LATENT if key not in ("n_routed_experts", "rope_parameters")},
    "q_lora_rank": None,
    "num_hidden_layers": 5,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "num_local_experts": 6,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
GRANITE_4: dict[str, Any] = {
    **GRANITE,
    "shared_intermediate_size": 96,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
NEMOTRON: dict[str, Any] = {**NEMOTRON_H, "mamba_head_dim": 16}
NEMOTRON_MOE: dict[str, Any] = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "moe_latent_size": 32,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
_GEMMA_LAYERS: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "final_logit_softcapping": 9.0,
}
GEMMA_3N: dict[str, Any] = {
    **_GEMMA_LAYERS,
    "laurel_rank": 6,
    "intermediate_size": [96, 96, 96, 64, 64, 64],
    "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0, 0.0, 0.0],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
#: What llama.cpp has of the published models. It divides the squares of gates by one less than
#: their number, which changes little where they are many.
GEMMA_3N_SIZES: dict[str, Any] = {
    **GEMMA_3N,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "laurel_rank": 64,
    "intermediate_size": [8192] * 5,
    "activation_sparsity_pattern": [0.95] * 5,
    "final_logit_softcapping": 30.0,
}
GEMMA_4: dict[str, Any] = {
    **_GEMMA_LAYERS,
    "global_head_dim": 32,
    "use_double_wide_mlp": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
GEMMA_4_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}


@dataclass
class Case:
    """A model of `transformers`: the prefix of its classes, its settings, and what its config has
    in a repository. The GELU of llama.cpp is less exact."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    has_gelu: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("Llama", {"rope_parameters": LLAMA_3}),
    "llama biases": Case("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama linear": Case(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": Case("Mistral", {"sliding_window": None}),
    "mixtral": Case(
        "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 4, "use_sliding_window": False}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3", {"head_dim": 16}),
    "qwen3moe": Case("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen2moe": Case("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "olmoe": Case("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "gemma": Case("Gemma", {"head_dim": 16}, has_gelu=True),
    "gemma2": Case("Gemma2", GEMMA, has_gelu=True),
    "gemma3": Case("Gemma3", {**GEMMA, "num_hidden_layers": 7}, has_gelu=True),
    "phi3": Case(
        "Phi3",
        {
            "sliding_window": None,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": LONG,
                "long_factor": LONG,
            },
        },
    ),
    "gpt-oss": Case("GptOss", {**GPT_OSS, "rope_parameters": ROPE}),
    "gpt-oss yarn": Case("GptOss", {**GPT_OSS, "rope_parameters": YARN}),
    "olmo2": Case("Olmo2"),
    "olmo3": Case("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "seed_oss": Case("SeedOss", {"head_dim": 16}),
    "exaone4": Case("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    # llama.cpp has windows in models of 64 layers only.
    "exaone4 windows": Case(
        "Exaone4",
        {
            "sliding_window": 6,
            "sliding_window_pattern": 4,
            "num_hidden_layers": 64,
            "initializer_range": 0.05,
        },
    ),
    "granite": Case("Granite", GRANITE),
    "starcoder2": Case("Starcoder2", has_gelu=True),
    "arcee": Case("Arcee"),
    "glm4": Case("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "chatglm": Case("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "ernie4_5": Case("Ernie4_5", {"head_dim": 16}),
    "nemotron": Case("Nemotron"),
    "phi2": Case("Phi", has_gelu=True),
    "olmo": Case("Olmo", {"clip_qkv": 1.0}),
    "stablelm": Case("StableLm"),
    "mistral3": Case("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL}),
    "glm4moe": Case("Glm4Moe", {**BESIDE_SHARED, "partial_rotary_factor": 0.5}),
    "dots1": Case("Dots1", {**BESIDE_SHARED, "num_key_value_heads": 4, "sliding_window": None}),
    "qwen3next": Case(
        "Qwen3Next",
        {**GATED_DELTA, **QWEN_EXPERTS, "num_hidden_layers": 2, "full_attention_interval": 2},
    ),
    "qwen35": Case("Qwen3_5", GATED_DELTA),
    "qwen35moe": Case("Qwen3_5Moe", {**GATED_DELTA, **QWEN_EXPERTS, "full_attention_interval": 2}),
    "deepseek2": Case("DeepseekV3", {**LATENT, "n_group": 2, "topk_group": 1}),
    "deepseek2 v2": Case("DeepseekV2", {**LATENT, "n_group": 1, "topk_group": 1}),
    "deepseek2 kimi_k2": Case(
        "DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1}, config={"model_type": "kimi_k2"}
    ),
    "deepseek2 glm": Case("Glm4MoeLite", GLM_LITE),
    "kimi-linear": Case("KimiLinear", KIMI_LINEAR),
    "lfm2": Case("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2moe": Case(
        "Lfm2Moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "mamba": Case("Mamba", {"time_step_rank": 5, "state_size": 16, "intermediate_size": 128}),
    "mamba falcon": Case("FalconMamba", {"tie_word_embeddings": False, "intermediate_size": 128}),
    "mamba2": Case("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "falcon-h1": Case("FalconH1", {**FALCON_H1, "mamba_rms_norm": False}),
    "falcon-h1 norm": Case(
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
        },
    ),
    "granitehybrid": Case("GraniteMoeHybrid", GRANITE_4),
    "granitehybrid experts": Case(
        "GraniteMoeHybrid",
        {
            **GRANITE_4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": Case("NemotronH", NEMOTRON),
    "nemotron_h_moe": Case("NemotronH", NEMOTRON_MOE),
    "gemma3n": Case("Gemma3n", GEMMA_3N, has_gelu=True),
    "gemma3n sizes": Case("Gemma3n", GEMMA_3N_SIZES, has_gelu=True),
    "gemma4": Case("Gemma4", GEMMA_4, has_gelu=True),
    "gemma4 experts": Case("Gemma4", {**GEMMA_4, **GEMMA_4_EXPERTS}, has_gelu=True),
    "gpt2": Case("GPT2", {"n_embd": 64}, has_gelu=True),
    "starcoder": Case("GPTBigCode", {"n_embd": 64}, has_gelu=True),
    "gptneox": Case(
        "GPTNeoX", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, has_gelu=True
    ),
    "falcon": Case("Falcon", {"num_attention_heads": 1}, has_gelu=True),
    "falcon new": Case(
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, has_gelu=True
    ),
    "bloom": Case("Bloom", has_gelu=True),
    "mpt": Case("Mpt", {"d_model": 64, "attn_config": {"clip_qkv": 0.7}}, has_gelu=True),
    "cohere": Case("Cohere", {"logit_scale": 0.3}),
    "cohere2": Case("Cohere2", {"logit_scale": 0.3, "sliding_window": 6, "num_hidden_layers": 4}),
}


def folder_of(case: str, path: Path, kind: str = "gpt-2", **settings: Any) -> tuple[Any, Path]:
    """A random model of `transformers`, and its repository with a tokenizer."""
    found = CASES[case]
    model = hf_model(found.family, **{**SIZES, **found.settings, **settings})
    folder = path / "repository"
    model.save_pretrained(folder)
    write_tokenizer(folder, kind)
    add_to_config(folder, **found.config)
    return model, folder


def written(folder: Path, format: str = "f32") -> Path:
    out = folder.parent / f"{format}.gguf"
    quantize_file(FolderFile(load_checkpoint(folder)), out, format)
    return out


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def mean_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The mean error, by the mean size of logits: in some rows other experts may be chosen."""
    return float(np.abs(found - expected).mean() / np.abs(expected).mean())


def test_every_architecture_has_a_case() -> None:
    own = {"command-r" if name == "cohere" else name.split()[0] for name in CASES}
    # These have tests of their own.
    assert set(FORMS) <= {*own, "rwkv7", "codeshell", "bert", "modern-bert"}


#: llama.cpp v0.5.0 has the sizes of the published models, as "gemma3n sizes" does.
NOT_OF_LLAMA_CPP = "gemma3n"
SLOW = ("exaone4 windows",)
NAMES = [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]


@pytest.mark.parametrize("case", NAMES)
def test_a_written_folder_is_the_same_model(case: str, tmp_path: Path) -> None:
    model, folder = folder_of(case, tmp_path)
    expected = hf_logits(model, TOKENS)
    path = written(folder)
    assert error(logits(built(load_checkpoint(path)), chain(TOKENS)), expected) < 1e-4
    packed = written(folder, "q8_0")
    check_packed(GGUFFile(path), GGUFFile(packed))
    found = logits(built(load_checkpoint(packed)), chain(TOKENS))
    assert 0 < mean_error(found, expected) < PACKED_ERROR


@pytest.mark.parametrize("is_parallel", [True, False])
def test_files_of_stablelm_say_whether_sublayers_are_parallel(
    is_parallel: bool, tmp_path: Path
) -> None:
    """The file itself tells without the key, which llama.cpp reads."""
    _, folder = folder_of("stablelm", tmp_path, use_parallel_residual=is_parallel)
    metadata = GGUFFile(written(folder)).metadata
    assert metadata["stablelm.use_parallel_residual"] is is_parallel


def check_packed(exact: GGUFFile, packed: GGUFFile) -> None:
    """Every matrix is that of the exact file, rounded in blocks of 32, and other tensors are."""
    assert list(packed.tensors) == list(exact.tensors)
    formats = {info.format for info in packed.tensors.values()}
    assert "Q8_0" in formats and formats <= {"F32", "Q8_0"}
    for name in exact.tensors:
        values, other = exact.read(name), packed.read(name)
        assert isinstance(values, np.ndarray)
        if not isinstance(other, Weight):
            assert np.array_equal(values, other)
            continue
        blocks = values.reshape(-1, 32)
        step = np.abs(blocks).max(1, keepdims=True) / 127
        assert (np.abs(dequantize(other).reshape(-1, 32) - blocks) < 0.6 * step + 1e-6).all()


@pytest.mark.parametrize("case", [x for x in NAMES if x != NOT_OF_LLAMA_CPP])
def test_llama_cpp_has_the_same_logits(case: str, tmp_path: Path) -> None:
    model, folder = folder_of(case, tmp_path)
    expected = hf_logits(model, TOKENS)
    margin = GELU_MARGIN if CASES[case].has_gelu else 2e-5 * float(np.abs(expected).max())
    assert error(llama_cpp_logits(written(folder), TOKENS), expected) < margin
    packed = llama_cpp_logits(written(folder, "q8_0"), TOKENS)
    assert 0 < mean_error(packed, expected) < PACKED_ERROR


@pytest.mark.parametrize(
    "case, name, wrong",
    [
        ("llama", "INTERLEAVED", ()),
        ("gemma", "has_one_added", lambda *names: False),
        ("llama", "rope_tensors", lambda *parts: {}),
    ],
)
def test_a_wrong_twin_is_noticed(
    case: str, name: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys that are not moved, norms without 1, and rope factors left out: the
    last is refused, because the metadata describe another model."""
    model, folder = folder_of(case, tmp_path)
    monkeypatch.setattr(gguf_folder, name, wrong)
    if name == "rope_tensors":
        with pytest.raises(CheckpointError, match=r"no form for this model's layers\[0\]\.rope"):
            written(folder)
        return
    found = logits(built(load_checkpoint(written(folder))), chain(TOKENS))
    assert error(found, hf_logits(model, TOKENS)) > 0.1


def texts_of(kind: str, seed: int) -> list[str]:
    """The kind Metaspace puts no space in front of one, where llama.cpp does."""
    texts = strings(seed)
    return [text.lstrip(" ") for text in texts] if kind.endswith("metaspace") else texts


@pytest.mark.parametrize("kind", [*SPLITS, *MARKS])
def test_tokens_are_those_of_the_repository(kind: str, tmp_path: Path) -> None:
    """Wrong twin: the pre-tokenizer of another name, or a text that does not begin with a space."""
    _, folder = folder_of("llama", tmp_path, kind, num_hidden_layers=1)
    file = GGUFFile(written(folder))
    source = HFTokenizer.from_folder(folder)
    assert source is not None
    texts = texts_of(kind, 1)
    expected = [source.encode(text) for text in texts]
    assert len(set(map(tuple, expected))) > 250
    own = HFTokenizer.from_gguf(file.metadata)
    assert [own.encode(text) for text in texts] == expected
    assert own.encode("a<tool><|im_end|>") == source.encode("a<tool><|im_end|>")
    assert own.eos_ids >= source.eos_ids and own.bos_id == source.bos_id
    assert own.chat_template == source.chat_template
    assert [own.decode(ids) for ids in expected] == [source.decode(ids) for ids in expected]
    if kind in SPLITS:
        assert file.metadata["tokenizer.ggml.pre"] == SPLITS[kind][1]
    name = "pre" if kind in SPLITS else "add_space_prefix"
    other = "bloom" if kind in SPLITS else not MARKS[kind]
    twin = HFTokenizer.from_gguf({**file.metadata, f"tokenizer.ggml.{name}": other})
    assert [twin.encode(text) for text in texts] != expected


@pytest.mark.parametrize("kind", [*SPLITS, *MARKS])
def test_llama_cpp_has_the_same_tokens(kind: str, tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path, kind, num_hidden_layers=1)
    source = HFTokenizer.from_folder(folder)
    assert source is not None
    texts = texts_of(kind, 2)
    found = llama_cpp_tokens(written(folder), texts)
    assert found == [source.encode(text) for text in texts]


def test_the_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is that of the folder, and an existing file stays."""
    num_tokens = trained("gpt-2").get_vocab_size()
    _, folder = folder_of("llama", tmp_path, vocab_size=num_tokens)
    out = tmp_path / "new.gguf"
    arguments = ["quantize", str(folder), str(out), "--format", "f32", "--prompt", "the cat"]
    assert run([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_bytes"] == out.stat().st_size and summary["error"] == 0
    with LLM(str(folder), dtype="float32") as llm:
        assert summary["text"] == llm.generate("the cat", max_tokens=16).text != ""
    assert run(arguments) == main.USAGE_ERROR
    assert "exists" in capsys.readouterr().err


def test_what_has_no_form_is_refused(tmp_path: Path) -> None:
    """A window of Mistral, another family, and a tensor that files do not have."""
    _, folder = folder_of("mistral", tmp_path, sliding_window=6)
    with pytest.raises(CheckpointError, match=r"of llama have no form .*attention\.window"):
        FolderFile(load_checkpoint(folder))
    add_to_config(folder, sliding_window=None)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.r_proj.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor for 'model\.layers\.0\.self_attn\.r_"):
        FolderFile(load_checkpoint(folder))
    other = hf_model("Helium", **SIZES, head_dim=16)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="'helium' are not written to GGUF files; supported"):
        FolderFile(load_checkpoint(tmp_path / "other"))


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main.run(arguments)
    return int(stopped.value.code or 0)


def test_sampling_options_are_written_by_the_names_of_llama_cpp(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path)
    options = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **options}))
    path = written(folder)
    assert GGUFFile(path).metadata["general.sampling.penalty_repeat"] == pytest.approx(1.05)
    with LLM(path, generation_config="auto") as llm:
        assert llm.sampling_defaults == options


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_repository_is_written_from_its_values(name: str, tmp_path: Path) -> None:
    """Matrices that are packed in a format of GGUF stay as they are where the new format has as
    many bits."""
    case = LAYOUTS[name]
    model, folder = folder_of("llama", tmp_path, hidden_size=128, intermediate_size=256)
    tensors = load_file(folder / "model.safetensors")
    for layer_name in [x for x in tensors if "_proj.weight" in x]:
        parts, values = case.write(tensors.pop(layer_name), **case.options)
        module = layer_name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        model.get_parameter(layer_name).data.copy_(torch_of(values))
    save_file(tensors, folder / "model.safetensors")
    add_to_config(folder, quantization_config=case.settings)
    expected = hf_logits(model, TOKENS)
    read = logits(built(load_checkpoint(folder), "float32"), chain(TOKENS))
    source = FolderFile(load_checkpoint(folder))
    assert source.method == case.settings["quant_method"]
    paths = [tmp_path / "all.gguf", tmp_path / "kept.gguf"]
    for path, keep_packed in zip(paths, (False, True), strict=True):
        quantize_file(source, path, "f32", keep_packed=keep_packed)
        found = logits(built(load_checkpoint(path), "float32"), chain(TOKENS))
        assert error(found, read) < 1e-4
        assert error(found, expected) < 2e-2 * np.abs(expected).max()
    formats = {info.format for info in GGUFFile(paths[0]).tensors.values()}
    assert formats == {"F32"}
    kept = {info.format for info in GGUFFile(paths[1]).tensors.values()} - {"F32"}
    assert kept == ({case.format} if name in KEPT else set())


def in_mxfp4(folder: Path, model: Any) -> dict[str, np.ndarray]:
    """Replace the experts of gpt-oss by random ones in MXFP4: byte i of 16 has the values 2i, in
    its low half, and 2i + 1."""
    tensors = load_file(folder / "model.safetensors")
    generator, numbers = np.random.default_rng(7), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate((numbers, -numbers))
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = generator.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
        scales = generator.integers(121, 126, blocks.shape[:-1], np.uint8)
        values = np.stack((numbers[blocks & 15], numbers[blocks >> 4]), -1)
        values = values.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
        values = values.reshape(count, rows, columns).swapaxes(1, 2)
        model.get_parameter(name).data.copy_(torch_of(values))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    add_to_config(folder, quantization_config={"quant_method": "mxfp4"})
    return tensors


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    """Wrong twin: halves of bytes in the order of safetensors, not values i and i + 16."""
    model, folder = folder_of("gpt-oss", tmp_path)
    tensors = in_mxfp4(folder, model)
    path = tmp_path / "new.gguf"
    quantize_file(FolderFile(load_checkpoint(folder)), path, "bf16", keep_packed=True)
    file = GGUFFile(path)
    for layer in range(3):
        blocks = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj_blocks"][:, 1::2]
        scales = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj_scales"][:, 1::2]
        stored = file.read(f"blk.{layer}.ffn_up_exps.weight")
        assert isinstance(stored, Weight) and stored.format == "MXFP4"
        halves = np.stack((blocks & 15, blocks >> 4), -1).reshape(*scales.shape, 2, 16)
        packed = halves[..., 0, :] | halves[..., 1, :] << 4
        found = stored.data.reshape(*scales.shape, 17)
        assert np.array_equal(found, np.concatenate((scales[..., None], packed), -1))
        assert not np.array_equal(found[..., 1:], blocks)
    expected = hf_logits(model, TOKENS)
    assert error(logits(built(load_checkpoint(written(folder))), chain(TOKENS)), expected) < 1e-4
    assert mean_error(llama_cpp_logits(path, TOKENS), expected) < PACKED_ERROR


def test_the_command_says_what_became_of_quantised_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model, folder = folder_of("gpt-oss", tmp_path, **sizes)
    in_mxfp4(folder, model)
    for format, what in (("q8_0", "stay in MXFP4"), ("q2_k", "were written again from their")):
        out = tmp_path / f"{format}.gguf"
        assert run(["quantize", str(folder), str(out), "--format", format, "--prompt", ""]) == 0
        assert f"quantised (mxfp4): its weights {what}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "case, format", [("llama", "q4_0"), ("qwen35moe", "q4_0"), ("llama", "ptq161")]
)
def test_calibration_reads_a_folder_as_the_file_of_it(
    case: str, format: str, tmp_path: Path
) -> None:
    """Rejects calibration that is left out."""
    _, folder = folder_of(case, tmp_path, num_hidden_layers=2)
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on the mat")
    written(folder)
    options = ["--format", format, "--prompt", ""]
    for source in ("repository", "f32.gguf"):
        arguments = ["quantize", str(tmp_path / source), str(tmp_path / f"{source}.new.gguf")]
        assert run([*arguments, *options, "--calibrate", str(texts)]) == 0
    files = [GGUFFile(tmp_path / f"{x}.new.gguf") for x in ("repository", "f32.gguf")]
    assert {*files[0].tensors} == {*files[1].tensors}
    for name in files[0].tensors:
        one, two = (file.read(name) for file in files)
        if isinstance(one, Weight) and isinstance(two, Weight):
            assert np.array_equal(one.data, two.data)
    if format == "q4_0":
        plain = GGUFFile(written(folder, format))
        data = (file.read("blk.1.attn_output.weight") for file in (plain, files[0]))
        assert not np.array_equal(*(one.data for one in data if isinstance(one, Weight)))


RWKV: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 64,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 260,
    "value_dim": None,
    **{f"{part}_low_rank_dim": 32 for part in ("decay", "gate", "a", "v")},
}


def rwkv_folder(path: Path) -> Path:
    """RWKV-7 in the layout of flash-linear-attention, with a token for each byte."""
    folder = write_folder(path / "repository", rwkv_tensors(RWKV), **RWKV)
    lines = (f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256))
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines))
    return folder


def test_rwkv_7_follows_the_papers_equations(tmp_path: Path) -> None:
    """And the tokens are those of the repository."""
    pytest.importorskip("torch")
    folder = rwkv_folder(tmp_path)
    expected = paper_logits(RWKV, rwkv_tensors(RWKV), TOKENS)
    checkpoint, source = load_checkpoint(written(folder)), load_checkpoint(folder).tokenizer
    assert error(logits(built(checkpoint), chain(TOKENS)), expected) < 1e-4
    assert source is not None and checkpoint.tokenizer is not None
    for text in strings(3):
        assert checkpoint.tokenizer.encode(text) == source.encode(text)
    assert checkpoint.tokenizer.eos_ids == source.eos_ids


def test_llama_cpp_has_the_same_logits_and_tokens_of_rwkv_7(tmp_path: Path) -> None:
    folder = rwkv_folder(tmp_path)
    expected = paper_logits(RWKV, rwkv_tensors(RWKV), TOKENS)
    path, source = written(folder), load_checkpoint(folder).tokenizer
    assert error(llama_cpp_logits(path, TOKENS), expected) < 2e-4
    assert source is not None
    found = llama_cpp_tokens(path, strings(4))
    assert found == [source.encode(text) for text in strings(4)]


def codeshell_folder(path: Path) -> Path:
    """CodeShell as it is published, with a token for each byte."""
    family = FAMILIES["codeshell"]
    tensors = family.published(dict(family.decoder(0).tensors))
    folder = write_folder(path / "repository", tensors, **config_of("codeshell"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_codeshell_is_that_of_its_paper(tmp_path: Path) -> None:
    expected = FAMILIES["codeshell"].decoder(0).forward(TOKENS)
    path = written(codeshell_folder(tmp_path))
    assert error(logits(built(load_checkpoint(path)), chain(TOKENS)), expected) < 1e-4
    assert "blk.0.attn_qkv.weight" in GGUFFile(path).tensors


def test_llama_cpp_has_the_same_logits_of_codeshell(tmp_path: Path) -> None:
    expected = FAMILIES["codeshell"].decoder(0).forward(TOKENS)
    found = llama_cpp_logits(written(codeshell_folder(tmp_path)), TOKENS)
    assert error(found, expected) < GELU_MARGIN


def embedding_folder(path: Path) -> tuple[Any, Path]:
    """A model as Qwen3-Embedding is published: the state of the last token."""
    model, folder = folder_of("qwen3", path, tie_word_embeddings=True)
    return model, declare_pooling(folder, "lasttoken")


def test_an_embedding_model_keeps_its_pooling(tmp_path: Path) -> None:
    _, folder = embedding_folder(tmp_path)
    pooling = load_checkpoint(written(folder)).pooling
    assert pooling is not None and pooling.mode == "last"
    declare_pooling(folder, "lasttoken", is_normalized=False)
    with pytest.raises(CheckpointError, match="not scaled to length 1"):
        FolderFile(load_checkpoint(folder))


def test_llama_cpp_has_the_same_embedding(tmp_path: Path) -> None:
    import torch

    model, folder = embedding_folder(tmp_path)
    with torch.inference_mode():
        states = model.model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    assert error(llama_cpp_embedding(written(folder), TOKENS), states[-1]) < 1e-4


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
def test_a_big_folder_is_not_in_memory(case: str, tmp_path: Path) -> None:
    """The peak is far below the model in float32, of which bfloat16 would be half."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 512}
    if case == "qwen3moe":
        sizes |= {"moe_intermediate_size": 128}
    model, folder = folder_of(case, tmp_path, **sizes)
    model.bfloat16().save_pretrained(folder)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    checkpoint = load_checkpoint(folder)
    tracemalloc.start()
    quantize_file(FolderFile(checkpoint), tmp_path / "new.gguf", "q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 3


def test_a_name_of_the_hub_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    _, folder = folder_of("llama", tmp_path, num_hidden_layers=1)
    cache = tmp_path / "hub" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0123")
    (cache / "snapshots").mkdir()
    folder.rename(cache / "snapshots" / "0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    out = tmp_path / "new.gguf"
    assert run(["quantize", "someone/tiny", str(out), "--format", "q8_0", "--prompt", ""]) == 0
    assert GGUFFile(out).metadata["general.name"] == "someone/tiny"


def add_to_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def torch_of(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, np.float32))

"""DeepSeek-V4 in GGUF, with the names and metadata of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_models
from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from anydecode.quantization.gguf import quantize_file
from gguf_models import finish, named_tensors, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from parity_cases import parity_module
from tiny_models import built, chain, hf_logits, hf_model, logits

#: More than an entry of 128 positions stands for, and several times `index_topk` entries of 4.
TOKENS = np.random.default_rng(0).integers(3, 130, 150).tolist()
#: The kinds of layers, by the number of positions of their entries.
RATIOS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
LAYERS = [0, 4, 128, 4]
OUTER = {
    **gguf_models.OUTER,
    **{f"model.hc_head.hc_{x}": f"output_hc_{x}.weight" for x in ("fn", "base", "scale")},
}
_COMPRESSOR = {"kv_proj": "kv", "gate_proj": "gate", "kv_norm": "norm"}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    **{
        f"self_attn.compressor.{x}.weight": f"attn_compressor_{y}.weight"
        for x, y in _COMPRESSOR.items()
    },
    **{
        f"self_attn.compressor.indexer.{x}.weight": f"indexer_compressor_{y}.weight"
        for x, y in _COMPRESSOR.items()
    },
    **{
        f"{part}_hc.{x}": f"hc_{part}_{x}.weight"
        for part in ("attn", "ffn")
        for x in ("fn", "base", "scale")
    },
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{
        f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
}


def model_of(**changes: Any) -> Any:
    """The model of the parity test with the published numbers of streams, and of positions of
    entries."""
    family, settings = parity_module("test_parity").CASES["deepseek v4"]
    sizes = {
        "hc_mult": 4,
        "layer_types": [RATIOS[ratio] for ratio in LAYERS],
        "compress_rates": {RATIOS[ratio]: ratio for ratio in (4, 128)},
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    return hf_model(family, **{**settings, **sizes, **changes})


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The tensors by their names in the file."""
    found, others = named_tensors(model, OUTER)
    for block, rest, tensor in others:
        if rest.endswith("tid2eid"):
            found[block + NAMES[rest]] = tensor.astype(np.int32)
        elif rest in NAMES:
            found[block + NAMES[rest]] = tensor
        else:
            assert rest.endswith("_inv_freq"), rest
    return found


def write(path: Path, model: Any, **changes: Any) -> Path:
    """Write the file; `changes` replaces tensors and metadata, None leaves them out."""
    config = model.config
    head, rotary = config.head_dim, int(config.head_dim * config.partial_rotary_factor)
    metadata: dict[str, Any] = {
        **usual_metadata(config.to_dict(), len(LAYERS)),
        "attention.head_count_kv": 1,
        "attention.key_length": head,
        "attention.value_length": head,
        "feed_forward_length": None,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": rotary,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.output_group_count": config.o_groups,
        "attention.compress_ratios": LAYERS,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.sliding_window": config.sliding_window,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 4,
        "hash_layer_count": 2,
        "swiglu_clamp_exp": [config.swiglu_limit] * len(LAYERS),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
    }
    tensors = tensors_of(model)
    for name, value in changes.items():
        target = tensors if name.startswith(("blk.", "output")) else metadata
        target[name] = value
    writer = writer_with(path / "tiny.gguf", "deepseek4", metadata, config.vocab_size)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    return path / "tiny.gguf"


def found_logits(path: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    return logits(built(load_checkpoint(path)), chain(tokens))


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    """Wrong twins: fewer entries, another base of rotations, fewer layers with experts by token,
    another limit."""
    model = model_of()
    expected = hf_logits(model, TOKENS)
    assert np.abs(found_logits(write(tmp_path, model)) - expected).max() < 1e-4
    changes: list[dict[str, Any]] = [
        {"attention.indexer.top_k": 4},
        {"attention.compress_rope_freq_base": 1000.0},
        {"rope.scaling.type": None},
        {"rope.dimension_count": 6},
        {"swiglu_clamp_exp": [0.6] * len(LAYERS)},
        {"expert_weights_scale": 1.0},
        {"hyper_connection.sinkhorn_iterations": 1},
        {"attention.sliding_window": 6},
    ]
    for change in changes:
        wrong = found_logits(write(tmp_path, model, **change))
        assert np.abs(wrong - expected).max() > 1e-3, change


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = write(tmp_path, model_of(index_head_dim=128))  # which it rotates in blocks of 64
    expected = llama_cpp_logits(path, TOKENS)
    assert np.abs(found_logits(path) - expected).max() < 1e-4


def test_quantised_files_open(tmp_path: Path) -> None:
    """The experts of tokens, the biases of entries and the hyper-connections keep their format."""
    path = write(tmp_path, model_of())
    target = tmp_path / "small.gguf"
    quantize_file(path, target, "Q8_0")
    checkpoint = load_checkpoint(target)
    assert checkpoint.tensors["model.layers.0.mlp.gate.tid2eid"].dtype == np.int32
    expected = found_logits(path)
    assert 0 < np.abs(logits(built(checkpoint), chain(TOKENS)) - expected).max() < 1.0


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Old files count them in `nextn_predict_layers` alone."""
    model = model_of()
    expected = found_logits(write(tmp_path, model))
    old = found_logits(write(tmp_path, model, nextn_predict_layers=1))
    assert np.array_equal(old, expected)
    further = {"blk.4.nextn.eh_proj.weight": np.ones((48, 96), np.float32)}
    more = {"block_count": 5, "attention.compress_ratios": [*LAYERS, 0], "nextn_predict_layers": 1}
    assert np.array_equal(found_logits(write(tmp_path, model, **further, **more)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_gating_func": 2}, "expert_gating_func is 2; allowed is 4"),
        ({"swiglu_clamp_exp": [0.5, 0.5, 0.5, 0.6]}, "one limit for all layers"),
        ({"swiglu_clamp_exp": None}, "swiglu_clamp_exp is missing"),
        ({"attention.compress_ratios": [0, 4, 128]}, "a list of 4 integers"),
        ({"attention.compress_ratios": [0, 4, 64, 4]}, "compress_ratios is 64"),
        ({"attention.compress_ratios": [0, 4, 0, 4]}, None),
        ({"attention.compress_ratios": [4, 4, 128, 4]}, "compressor.* is missing"),
        ({"hash_layer_count": 3}, "layers.2.mlp.gate.tid2eid.* is missing"),
        ({"blk.1.hc_attn_fn.weight": None}, "layers.1.attn_hc.fn' is missing"),
        ({"output_hc_base.weight": np.ones(5, np.float32)}, "hc_base.* has shape"),
        ({"blk.0.ffn_gate_tid2eid.weight": np.full((131, 2), 6, np.int32)}, "from 6 to 6"),
        ({"blk.0.ffn_gate_tid2eid.weight": np.ones((131, 2), np.float32)}, "has no integers"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    """Tensors that no layer reads are no error."""
    path = write(tmp_path, model_of(), **change)
    if message is None:
        built(load_checkpoint(path))
        return
    with pytest.raises(CheckpointError, match=message) as error:
        built(load_checkpoint(path))
    assert "\n" not in str(error.value)

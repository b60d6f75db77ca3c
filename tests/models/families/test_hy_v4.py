"""Hy4: rotary pairs, names and config of the published repository, GGUF files, and what is refused.

The logits are those of `transformers` for the model whose rotary rows are in its order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, usual_metadata, write_folder, writer_with
from llama_cpp_logits import llama_cpp_logits
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TOKENS = np.random.default_rng(0).integers(3, 130, 40).tolist()
#: Keys of the config that say that rotary rows are in the order of `transformers`.
ORDER = ("rope_interleave", "indexer_rope_interleave")
PUBLISHED = {
    ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
    ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
    "hc_head.hc_": "hc_head.hc_head_",
    "self_attn.gate_proj": "self_attn.linear_gate",
    "self_attn.sinks": "self_attn.learnable_sink_param",
}


def model(**changes: Any) -> Any:
    return hf_model("HYV4", **{**parity_module("test_parity").HY_V4, **changes})


def published(theirs: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of the published repository."""
    config, found = theirs.config.to_dict(), {}
    for name, tensor in checkpoint_of(theirs).tensors.items():
        tensor = _paired(config, name, tensor)
        for usual, own in PUBLISHED.items():
            name = name.replace(usual, own)
        found[name] = tensor
    return {key: value for key, value in config.items() if key not in ORDER}, found


def _paired(config: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """A tensor whose rotary rows are those of pairs."""
    sizes = {
        "self_attn.q_b_proj.weight": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "self_attn.kv_a_proj_with_mqa.weight": len(tensor),
        "indexer.wq_b.weight": config["index_head_dim"],
        **{
            f"indexer.{part}": len(tensor) for part in ("wk.weight", "k_norm.weight", "k_norm.bias")
        },
    }
    size = next((size for end, size in sizes.items() if name.endswith(end)), None)
    if size is None:
        return tensor
    rotary = config["qk_rope_head_dim"]
    order = np.arange(size)
    order[-rotary:] = order[-rotary:].reshape(2, -1).T.ravel()
    heads = np.arange(len(tensor)).reshape(-1, size)
    return np.ascontiguousarray(tensor[heads[:, order].ravel()])


def test_the_published_names_and_pairs(tmp_path: Path) -> None:
    """Wrong twins: the order of `transformers`, fewer positions, other factors and limits."""
    theirs = model()
    config, tensors = published(theirs)
    expected = hf_logits(theirs, TOKENS)
    changes: list[dict[str, Any]] = [
        {},
        {"rope_interleave": False},
        {"indexer_rope_interleave": False},
        {"index_topk": 5},
        {"hc_magnitude": 1.0},
        {"hc_eps": 0.1},
        {"swiglu_limit": 5.0},
        {"swiglu_limit": 0.0},
    ]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_folder(folder, tensors, **{**config, **change})
        found = logits(built(load_checkpoint(folder)), chain(TOKENS))
        difference = np.abs(found - expected).max()
        assert difference > 1e-3 if change else difference < 1e-4, change


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.linear_gate": "attn_gate",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
#: Settings of a model that llama.cpp opens, and its metadata beside the usual.
FILE: dict[str, Any] = {"index_head_dim": 128, "hc_mult": 4, "n_group": 1, "topk_group": 1}


def as_gguf(theirs: Any, path: Path, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes of a model; `changes` replace or remove (None)
    metadata."""
    config, tensors = published(theirs)
    count, rank, rotary = (
        config[key] for key in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    )
    metadata: dict[str, Any] = {
        **usual_metadata(config, count),
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotary,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "swiglu_clamp_exp": [config["swiglu_limit"]] * count,
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.magnitude": config["hc_magnitude"],
        **changes,
    }
    writer = writer_with(path, "hy_v4", metadata, config["vocab_size"])
    for name, tensor in tensors.items():
        for own, stored in _stored(config, name, tensor).items():
            writer.add_tensor(own, np.ascontiguousarray(stored, np.float32))
    finish(writer)
    return path


def _stored(config: dict[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a file that one is stored as."""
    if name in OUTER:
        return {OUTER[name]: tensor}
    if name.startswith("model.hc_head."):
        return {f"output_{name.rpartition('.')[2].replace('hc_head_', 'hc_')}.weight": tensor}
    _, _, layer, part = name.split(".", 3)
    block, (module, _, leaf) = f"blk.{layer}.", part.rpartition(".")
    if part.endswith("experts.gate_up_proj"):
        halves = np.split(tensor, 2, 1)
        kinds = ("gate", "up")
        return {f"{block}ffn_{kind}_exps.weight": x for kind, x in zip(kinds, halves, strict=True)}
    if part.endswith("experts.down_proj"):
        return {f"{block}ffn_down_exps.weight": tensor}
    if part.startswith("hc_"):
        kind = {"hc_attn_layer": "attn", "hc_mlp_layer": "ffn"}[part.split(".")[0]]
        return {f"{block}hc_{kind}_{leaf.removeprefix('hc_')}.weight": tensor}
    if part.endswith("learnable_sink_param"):
        return {f"{block}attn_sinks.weight": tensor}
    if part.endswith("e_score_correction_bias"):
        return {f"{block}exp_probs_b.bias": tensor}
    if part == "self_attn.kv_b_proj.weight":
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])
        size = config["qk_nope_head_dim"]
        keys, values = heads[:, :size].swapaxes(1, 2), heads[:, size:]
        return {f"{block}attn_k_b.weight": keys, f"{block}attn_v_b.weight": values}
    return {f"{block}{NAMES[module]}.{leaf}": tensor}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_gguf_file(backend: str, tmp_path: Path) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    theirs = model(**FILE)
    opened = load_checkpoint(as_gguf(theirs, tmp_path / "tiny.gguf"))
    found = logits(built(opened, executor=choose_executor(backend)), chain(TOKENS))
    assert np.abs(found - hf_logits(theirs, TOKENS)).max() < 1e-4


def test_the_logits_of_llama_cpp(tmp_path: Path) -> None:
    """All its norms have the epsilon of the config."""
    path = as_gguf(model(**FILE, rms_norm_eps=1e-6), tmp_path / "tiny.gguf")
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types.0. is 'full_attention'"),
        ({"indexer_types": ["shared"] * 5}, "no indexer in this layer"),
        ({"indexer_types": ["full", "some"] * 3}, "indexer_types.1. is 'some'"),
        ({"enable_ihc": False}, "enable_ihc is False; allowed is true"),
        ({"hc_magnitude": -1.0}, "hc_magnitude is -1.0"),
        ({"hc_mult": 1}, "number of streams is 1"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str) -> None:
    config = checkpoint_of(model()).config
    with pytest.raises(CheckpointError, match=message) as error:
        spec_from_config({**config, **change})
    assert "\n" not in str(error.value)

"""LongCat-Flash beside `transformers`: shortcuts, experts that return their input, and the names of
its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import LowRank
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

BACKENDS = ["torch", "native"]
TOKENS = np.random.default_rng(0).integers(3, 130, 30).tolist()


def theirs(**changes: Any) -> Any:
    """The model of `transformers` of the parity test."""
    family, settings = parity_module("test_parity").CASES["longcat flash"]
    return hf_model(family, **{**settings, **changes})


def executor(backend: str) -> Any:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    return choose_executor(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_twins(backend: str) -> None:
    """Without the weights of experts that return their input, with halves in the other order, and
    with experts of another scale."""
    model = theirs()
    stored = checkpoint_of(model)
    found = logits(built(stored, executor=executor(backend)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4
    other = built(checkpoint_of(model, routed_scaling_factor=2.0), executor=executor(backend))
    assert np.abs(logits(other, chain(TOKENS)) - found).max() > 1e-2
    bias = "model.layers.0.mlp.router.e_score_correction_bias"
    stored.tensors[bias] = stored.tensors[bias].copy()
    stored.tensors[bias][-3:] = -1e9
    other = built(stored, executor=executor(backend))
    assert np.abs(logits(other, chain(TOKENS)) - found).max() > 1e-2
    stored = checkpoint_of(model)
    for name in [name for name in stored.tensors if ".mlps.0." in name]:
        twin = name.replace(".mlps.0.", ".mlps.1.")
        tensors = stored.tensors
        tensors[name], tensors[twin] = tensors[twin], tensors[name]
    other = built(stored, executor=executor(backend))
    assert np.abs(logits(other, chain(TOKENS)) - found).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_whose_experts_all_return_their_input(backend: str) -> None:
    """The products of experts have no rows then."""
    model = theirs()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[:6] = -1e9
    found = logits(built(checkpoint_of(model), executor=executor(backend)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


def test_packed_experts() -> None:
    """Quantised rows are those of the experts with matrices. Some rows choose other experts, since
    the kernels round their inputs."""
    stored = checkpoint_of(theirs(hidden_size=64, expert_ffn_hidden_size=32, ffn_hidden_size=64))
    expected, found = (
        logits(built(stored, "int8", executor=executor(backend)), chain(TOKENS))
        for backend in BACKENDS
    )
    assert np.median(np.abs(found - expected)) < 0.1 < np.median(np.abs(expected))


def test_names_that_transformers_writes(tmp_path: Path) -> None:
    """With one module per expert, as published checkpoints have them."""
    model = theirs()
    model.save_pretrained(tmp_path)
    expected = logits(built(checkpoint_of(model), executor=executor("torch")), chain(TOKENS))
    loaded = built(load_checkpoint(tmp_path), executor=executor("torch"))
    assert np.array_equal(logits(loaded, chain(TOKENS)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters(backend: str) -> None:
    """Their targets have the names of the checkpoint's modules. Rows have the logits of a model
    whose matrices are changed; those of experts are the first and the last one with matrices."""
    stored, generator = checkpoint_of(theirs()), np.random.default_rng(0)
    network = load_network(stored)
    adapter, tensors = {}, stored.tensors
    for name, stack, index in (
        ("layers.0.mlps.1.down_proj", "layers.0.mlps.1.down_proj.weight", ...),
        ("layers.1.self_attn.1.o_proj", "layers.1.self_attn.1.o_proj.weight", ...),
        ("layers.0.mlp.experts.0.down_proj", "layers.0.mlp.experts.down_proj", 0),
        ("layers.0.mlp.experts.5.down_proj", "layers.0.mlp.experts.down_proj", 5),
    ):
        tensor = tensors[f"model.{stack}"].copy()
        rows, columns = tensor[index].shape
        down, up = (
            generator.normal(size=size).astype(np.float32) * np.float32(0.3)
            for size in ((8, columns), (rows, 8))
        )
        tensor[index] += up @ down * np.float32(0.5)
        tensors[f"model.{stack}"] = tensor
        adapter[f"model.{name}"] = LowRank(plain_weight(down), plain_weight(up), 0.5)
    expected = logits(built(stored, executor=executor(backend)), chain(TOKENS))
    network.adapters.append(adapter)
    model, rows = Transformer(network, executor=executor(backend)), chain(TOKENS)
    rows.adapters = np.zeros(len(TOKENS), np.int32)
    assert np.abs(logits(model, rows) - expected).max() < 1e-3
    assert np.abs(logits(model, chain(TOKENS)) - expected).max() > 1e-1


def test_exits_from_layers_are_refused() -> None:
    tokenizer = ByteTokenizer()
    model = built(
        checkpoint_of(theirs(vocab_size=tokenizer.vocab_size)), executor=executor("torch")
    )
    with LLM(model, tokenizer=tokenizer) as llm:
        with pytest.raises(UnsupportedCombinationError, match="a memory") as caught:
            llm.generate("abc", decoder="layerskip", max_tokens=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"zero_expert_type": "constant"}, "zero_expert_type is 'constant'; allowed is 'identity'"),
        ({"zero_expert_num": -1}, "zero_expert_num is -1"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora is False; allowed is true"),
        ({"head_dim": 16}, "head_dim is 16; allowed is 8, qk_rope_head_dim"),
        ({"moe_topk": 10}, "experts_per_token is 10"),
    ],
)
def test_malformed_configs_end_in_one_line(changes: dict[str, Any], message: str) -> None:
    config = checkpoint_of(theirs()).config
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config({**config, **changes})
    assert "\n" not in str(caught.value)

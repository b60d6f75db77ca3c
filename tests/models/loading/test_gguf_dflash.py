"""Block drafters in GGUF files, as llama.cpp's converter writes them: the drafts are those of a
forward pass over the checkpoint that was converted, and files that do not fit are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.speculative import dflash as oracle
from anydecode.certification.tiny_blocks import (
    as_speculators,
    dflash2_checkpoint,
    dflash_checkpoint,
    dspark_checkpoint,
)
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.block_drafters import load_block_drafter
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_dflash import load_dflash
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.network import Network
from anydecode.quantization.gguf import quantize_file
from draft_folders import drafted_paths, target_folder
from gguf_models import VOCAB, finish, writer_with

OUTER = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
#: Whole names of DFlash2, outside the layers and within one.
CODEBOOKS = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def _speculators(target: Network) -> Checkpoint:
    return as_speculators(dspark_checkpoint(target), target)


DRAFTERS: dict[str, Any] = {
    "dflash": dflash_checkpoint,
    "windowed": partial(dflash_checkpoint, window=4),
    "dspark": dspark_checkpoint,
    "dflash2": partial(dflash2_checkpoint, has_factors=False),
    "a head for some tokens": _speculators,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def network(target: Path) -> Network:
    return load_network(load_checkpoint(target))


def write(path: Path, checkpoint: Checkpoint) -> Path:
    """A checkpoint as a GGUF file in float32, with the names and the keys of llama.cpp."""
    config: dict[str, Any] = {**checkpoint.config, **checkpoint.config.get("dflash_config", {})}
    config |= config.get("transformer_layer_config", {})
    writer = writer_with(path, "dflash", _metadata(config), VOCAB)
    writer.add_mask_token_id(config["mask_token_id"])
    for name, tensor in checkpoint.tensors.items():
        values = np.array(tensor)
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor(name, values + np.arange(len(values)))
            continue
        number, _, inner = name.removeprefix("layers.").partition(".")
        if name in CODEBOOKS or inner in CONVOLUTIONS:
            stored = CODEBOOKS.get(name) or f"blk.{number}.{CONVOLUTIONS[inner]}"
            writer.add_tensor(stored, values.astype(np.float32))
            continue
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)
            stored = names.get_name(f"model.{module}")
        else:
            stored = OUTER[module]
        writer.add_tensor(f"{stored}.{leaf}", values.astype(np.float32))
    finish(writer)
    return path


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    taps = config.get("aux_hidden_state_layer_ids")
    types = config.get("layer_types")
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "attention.sliding_window_pattern": types and [x == "sliding_attention" for x in types],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "block_size": config["block_size"],
        "target_layers": taps or [layer + 1 for layer in config["target_layer_ids"]],
        "sample_from_anchor": config.get("sample_from_anchor"),
        "attention.causal": config.get("is_causal"),
        "conv_kernel_size": config.get("conv_kernel_size"),
        "conv_group_size": config.get("conv_group_size"),
        "selector_rank": config.get("selector_rank"),
        "selector_top_k": config.get("selector_top_k"),
    }


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_a_forward_pass(
    name: str, target: Path, network: Network, tmp_path: Path
) -> None:
    checkpoint = DRAFTERS[name](network)
    file = write(tmp_path / "drafter.gguf", checkpoint)
    drafting = oracle.Drafting(checkpoint, network)
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "trace": True}
    num_drafted = 0
    with LLM(target, draft=file) as llm:
        for temperature in (0.0, 0.7):
            plain, drafted = (
                llm.generate([5, 6, 7], decoder=key, temperature=temperature, **options)
                for key in ("autoregressive", "dflash:threshold=0.02")
            )
            assert drafted.tokens == plain.tokens
            text = [5, 6, 7, *plain.tokens]
            for event in (drafted.trace or ())[1:5]:
                before = text[: event["position"]]
                expected = oracle.drafted(drafting, before, temperature, 7, 1, 0.02)
                assert set(drafted_paths(event)) == expected
                num_drafted += len(expected)
    assert num_drafted > 5


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_network_is_that_of_the_converted_checkpoint(
    name: str, network: Network, tmp_path: Path
) -> None:
    checkpoint = DRAFTERS[name](network)
    converted = load_checkpoint(write(tmp_path / "drafter.gguf", checkpoint))
    own, other = (load_draft_head(one, network) for one in (checkpoint, converted))
    assert (own.spec.states, own.spec.block) == (other.spec.states, other.spec.block)
    for first, second in zip(own.spec.layers, other.spec.layers, strict=True):
        assert first.attention == second.attention
    for one, two in zip(own.matrices(), other.matrices(), strict=True):
        assert np.array_equal(one.data, two.data)


def test_a_quantised_file_drafts(target: Path, network: Network, tmp_path: Path) -> None:
    file, small = write(tmp_path / "d.gguf", dspark_checkpoint(network)), tmp_path / "small.gguf"
    quantize_file(file, small, "q8_0")
    assert small.stat().st_size < file.stat().st_size
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "trace": True}
    with LLM(target, draft=small) as llm:
        plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
        drafted = llm.generate([5, 6, 7], decoder="dflash:threshold=0", **options)
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace or ())


def test_rotary_frequencies_may_be_scaled(network: Network, tmp_path: Path) -> None:
    """YaRN, as in drafters for long contexts."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    checkpoint = dflash_checkpoint(network)
    file = GGUFFile(write(tmp_path / "d.gguf", checkpoint))
    plain = load_block_drafter(load_dflash(file), network, None, np.take)  # type: ignore[arg-type]
    file.metadata |= {
        "dflash.rope.scaling.type": "yarn",
        "dflash.rope.scaling.factor": 4.0,
        "dflash.rope.scaling.original_context_length": 64,
    }
    config = {**checkpoint.config, "rope_scaling": scaling}
    scaled = Checkpoint(checkpoint.name, checkpoint.path, config, checkpoint.tensors)
    ropes = []
    for one in (load_dflash(file), scaled):
        rope = load_draft_head(one, network).spec.layers[0].rope
        assert rope is not None
        ropes.append(rope.frequencies)
    assert np.array_equal(*ropes)
    assert plain.spec.layers[0].rope is not None
    assert not np.array_equal(ropes[0], plain.spec.layers[0].rope.frequencies)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_size", None, "block_size is missing"),
        ("block_size", 1, "block_size is 1"),
        ("block_count", 1, "layers.1.* is not a part"),
        ("target_layers", None, "target_layers is missing"),
        ("target_layers", [1, 2, 9], "layer_ids"),
        ("attention.head_count", 0, "head_count"),
        ("attention.causal", "no", "causal"),
        ("attention.sliding_window_pattern", [True], "pattern has 1 entries"),
        ("rope.scaling.type", "dynamic", "rope scaling"),
        ("conv_kernel_size", 2, "lacks 'conv_group_size'"),
        ("selector_rank", 256, "candidate_selector"),
        ("sample_from_anchor", 3, "sample_from_anchor"),
    ],
)
def test_a_bad_key_is_refused(
    key: str, value: Any, message: str, network: Network, tmp_path: Path
) -> None:
    file = GGUFFile(write(tmp_path / "d.gguf", dflash_checkpoint(network, window=4)))
    file.metadata.pop(f"dflash.{key}", None)
    if value is not None:
        file.metadata[f"dflash.{key}"] = value
    _refused(file, network, message)


@pytest.mark.parametrize("mask", [None, VOCAB, "x"])
def test_a_bad_mask_token_is_refused(mask: Any, network: Network, tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "d.gguf", dflash_checkpoint(network)))
    file.metadata["tokenizer.ggml.mask_token_id"] = mask
    _refused(file, network, "mask_token_id")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", "selector_gate.weight", "blk.x.weight", "fc.scale"]
)
def test_an_unknown_tensor_is_refused(name: str, network: Network, tmp_path: Path) -> None:
    checkpoint, path = dflash_checkpoint(network), tmp_path / "d.gguf"
    write(path, checkpoint)
    file = GGUFFile(path)
    file.tensors[name] = file.tensors["fc.weight"].__class__(name, "F32", (4,), 0, 16)
    _refused(file, network, "is unknown in dflash")


def _refused(file: GGUFFile, network: Network, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_draft_head(load_dflash(file), network)
    assert "\n" not in str(refusal.value)


def test_a_drafter_alone_is_no_model(network: Network, tmp_path: Path) -> None:
    with pytest.raises(AnydecodeError, match="draft") as refused:
        LLM(write(tmp_path / "d.gguf", dflash_checkpoint(network)))
    assert "\n" not in str(refused.value)

"""Drafters that read states, opened from folders: published layouts, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import LLM
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    eagle_checkpoint,
    speculators_eagle_checkpoint,
    tiny_network,
)
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.drafters import Loader
from anydecode.models.families import load_network
from anydecode.models.hydra import load_hydra
from anydecode.models.loading import load_checkpoint
from anydecode.models.medusa import load_medusa
from anydecode.models.mtp import load_mtp
from anydecode.models.network import Network
from draft_folders import Change, changed, set_keys, target_folder, tensor, without
from tiny_models import checkpoint_of, hf_model

VOCAB = 259
#: The tokens of the head of `eagle3_checkpoint`.
TOKENS = [token for token in range(VOCAB) if token % 5]


@pytest.fixture(scope="module")
def target() -> Network:
    return tiny_network(layers=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(vocab_size=300), "vocab_size is 300"),
        (set_keys(hidden_size=128, head_dim=16), "hidden_size is 128"),
        (set_keys(num_attention_heads=0), "num_attention_heads"),
        (set_keys(num_hidden_layers=2), "layers.1"),
        (set_keys(rope_theta="x"), "rope_theta"),
        (set_keys(model_type="mamba"), "model_type"),
        (set_keys(speculators_model_type="mlp"), "speculators_model_type"),
        (tensor("fc.weight", np.ones((64, 64), np.float32)), "fc.weight"),
        (tensor("layers.1.mlp.up_proj.weight", np.ones((2, 2))), "contains more layers"),
        (without("layers.0.mlp.down_proj.weight"), "layers.0.mlp.down_proj"),
        (tensor("embed_tokens.weight", np.ones((2, 64), np.float32)), "embed_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_eagle_drafter_that_does_not_fit_is_refused(
    target: Network, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_draft_head(changed(eagle_checkpoint(target), change), target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(layernorms=True), "layers.0.input_layernorm"),
        (set_keys(layernorms="yes"), "layernorms"),
        (without("transformer.mlp.up_proj.weight"), "layers.0.mlp.up_proj"),
        (tensor("fusion_fc.bias", np.ones(3, np.float32)), "fc.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_eagle_drafter_of_speculators_that_does_not_fit_is_refused(
    target: Network, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_draft_head(changed(speculators_eagle_checkpoint(target), change), target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(vocab_size=300), "vocab_size is 300"),
        (set_keys(target_hidden_size=32), "target_hidden_size is 32"),
        (set_keys(draft_vocab_size=5), "d2t"),
        (set_keys(draft_vocab_size=-1), "draft_vocab_size"),
        (set_keys(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}), "layer_ids is"),
        (set_keys(eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}), "layer_ids is"),
        (set_keys(eagle_config={"eagle_aux_hidden_state_layer_ids": "all"}), "layer_ids"),
        (set_keys(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]}), "fc"),
        (set_keys(norm_before_fc=True), "input_norm.weight"),
        (set_keys(fc_norm="yes"), "fc_norm"),
        (set_keys(norm_output=3), "norm_output"),
        (tensor("d2t", np.zeros(3, np.int64)), "d2t is int64"),
        (tensor("d2t", np.zeros(len(TOKENS), np.float32)), "d2t is float32"),
        (tensor("d2t", np.full(len(TOKENS), 2**40)), "name different tokens"),
        (tensor("t2d", np.ones(VOCAB, bool)), "name different tokens"),
        (without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm"),
        (without("norm.weight"), "norm.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_eagle_3_drafter_that_does_not_fit_is_refused(
    target: Network, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_draft_head(changed(eagle3_checkpoint(target), change), target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("load", [load_draft_head, load_medusa, load_hydra, load_mtp])
def test_a_target_with_several_streams_has_no_drafters_that_read_states(load: Loader) -> None:
    theirs = hf_model(
        "Gemma3n",
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=131,
        laurel_rank=6,
    )
    network = load_network(checkpoint_of(theirs))
    with pytest.raises(CheckpointError, match="several streams") as caught:
        load(Checkpoint("drafter", Path("drafter"), {}, {}), network)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokens", [[0] * len(TOKENS), [2**40] * len(TOKENS)])
def test_invalid_tokens_of_a_head_are_refused(target: Network, tokens: list[int]) -> None:
    offsets = np.array(tokens) - np.arange(len(tokens))

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["d2t"] = offsets
        del tensors["t2d"]

    with pytest.raises(CheckpointError, match="d2t has neither the offsets") as refused:
        load_draft_head(changed(eagle3_checkpoint(target), change), target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("has_t2d", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_head_may_name_its_tokens_instead_of_offsets(
    target: Network, has_t2d: bool, is_named: bool
) -> None:
    """Known by t2d; without it, as the tokens' reading as offsets leaves the vocabulary."""

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        if is_named:
            tensors["d2t"] = np.array(TOKENS)
        if not has_t2d:
            del tensors["t2d"]

    network = load_draft_head(changed(eagle3_checkpoint(target), change), target)
    assert network.weights.head_tokens is not None
    assert network.weights.head_tokens.tolist() == TOKENS


def test_a_head_that_is_left_out_is_that_of_the_target(target: Network) -> None:
    network = load_draft_head(changed(eagle3_checkpoint(target), without("lm_head.weight")), target)
    assert network.weights.head_tokens is not None
    assert network.weights.head_tokens.tolist() == TOKENS
    assert network.weights.head.format == "BF16"
    rows = network.weights.head.data.astype(np.float32)
    assert np.allclose(rows, target.weights.head.data[TOKENS], rtol=2**-8)


def test_a_head_without_d2t_has_all_tokens(target: Network) -> None:
    network = load_draft_head(eagle3_checkpoint(target, has_all_tokens=True), target)
    assert network.weights.head_tokens is None
    assert network.spec.num_logits == VOCAB


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({}, (0, 1, 3)),
        ({"eagle_config": None}, (2, 2, 1)),  # as the reference: 2, half, three before the last
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4)),
        (
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            },
            (1, 2, 4),
        ),
    ],
    ids=["inputs", "default", "outer", "outputs"],
)
def test_taps_are_read_as_the_files_mean_them(
    target: Network, settings: dict[str, Any], taps: tuple[int, ...]
) -> None:
    network = load_draft_head(changed(eagle3_checkpoint(target), set_keys(**settings)), target)
    assert network.spec.states is not None
    assert network.spec.states.taps == taps


def test_the_layout_of_speculators_is_read(target: Network) -> None:
    """Its layers' settings are nested, its first layer is numbered, its residual normed."""
    plain = eagle3_checkpoint(target)

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        nested = {key: config.pop(key) for key in list(config) if key not in ("draft_vocab_size",)}
        taps = nested.pop("eagle_config")
        config |= taps | {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": nested,
            "target_hidden_size": None,
            "norm_before_residual": True,
        }
        for name in list(tensors):
            if name.startswith("midlayer."):
                tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    nested = load_draft_head(changed(plain, change), target)
    flat = load_draft_head(changed(plain, set_keys(norm_before_residual=True)), target)
    assert nested.spec.states == flat.spec.states
    assert nested.spec.layers[0].attention == flat.spec.layers[0].attention
    for one, other in zip(nested.matrices(), flat.matrices(), strict=True):
        assert np.array_equal(one.data, other.data)


def _folders(folder: Path, make: Callable[..., Checkpoint]) -> tuple[Path, Path]:
    """The folders of a target and of its drafter."""
    model = target_folder(folder / "model")
    drafter = make(load_network(load_checkpoint(model)))
    path = folder / "drafter"
    path.mkdir()
    tensors = {name: np.array(x) for name, x in drafter.tensors.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(drafter.config))
    return model, path


@pytest.mark.parametrize(
    "make", [eagle_checkpoint, eagle3_checkpoint, speculators_eagle_checkpoint]
)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(
    tmp_path: Path, make: Callable[..., Checkpoint], dtype: str | None
) -> None:
    model, drafter = _folders(tmp_path, make)
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    with LLM(model, draft=drafter, dtype=dtype) as llm:
        plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
        drafted = llm.generate([5, 6, 7], decoder="eagle", trace=True, **options)
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace or ())


def test_a_drafter_alone_is_no_model(tmp_path: Path) -> None:
    _, drafter = _folders(tmp_path, eagle_checkpoint)
    with pytest.raises(AnydecodeError, match="draft") as refused:
        LLM(drafter)
    assert "\n" not in str(refused.value)

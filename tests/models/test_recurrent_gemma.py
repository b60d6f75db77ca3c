"""RecurrentGemma's files: the published config, and what is refused. `test_parity.py` compares its
logits with those of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import RecurrentWeights
from anydecode.models.opening import choose_executor
from anydecode.models.spec import ModelSpec
from tiny_models import built, chain, checkpoint_of, greedy, hf_logits, hf_model, logits

SETTINGS = {"num_hidden_layers": 4, "attention_window_size": 7, "num_key_value_heads": 1}
PROMPT = [5, 17, 3, 99, 42, 8]


def checkpoint(**changes: Any) -> Checkpoint:
    return checkpoint_of(hf_model("RecurrentGemma", **SETTINGS), **changes)


def test_a_config_as_it_is_published() -> None:
    """The pattern of layers has another name, and all keys stand at the top."""
    model = hf_model("RecurrentGemma", **SETTINGS)
    stored = checkpoint_of(model)
    newer = ("block_types", "rope_parameters", "layer_types", "max_position_embeddings")
    stored.config = {key: value for key, value in stored.config.items() if key not in newer}
    stored.config |= {
        "_block_types": ["recurrent", "recurrent", "attention"],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "lru_width": 48,
    }
    network = built(stored)
    assert [layer.attention is None for layer in network.spec.layers] == [True, True, False, True]
    assert network.spec.max_positions == 1 << 20
    assert np.abs(logits(network, chain(PROMPT)) - hf_logits(model, PROMPT)).max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_gates_keep_their_format(dtype: str) -> None:
    backend = "torch" if load_library() is None else "native"
    stored = checkpoint_of(hf_model("RecurrentGemma", **SETTINGS, hidden_size=128))
    model = built(stored, dtype, executor=choose_executor(backend, threads=1))
    assert len(greedy(model, PROMPT, 8)) == 8
    layer = model.network.weights.layers[0].recurrent
    assert isinstance(layer, RecurrentWeights)
    assert {block.format for block in layer.input_blocks + layer.recurrence_blocks} == {"F32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_types": ["recurrent", "mlp"]}, "block_types is .*; allowed is a list of recur"),
        ({"block_types": 3}, "block_types is 3"),
        ({"lru_width": 46}, "lru_width is 46; allowed is a multiple of the 4 heads"),
        ({"lru_width": 64}, "linear_x.weight has shape"),
        ({"conv1d_width": 0}, "conv1d_width is 0"),
        ({"conv1d_width": 65}, "conv size is 65"),
        ({"conv1d_width": 3}, "conv_1d.weight has shape"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"intermediate_size": 1}, "intermediate_size is 1"),
        ({"intermediate_size": 82}, "mlp_block.gate_proj.weight has shape"),
        ({"logits_soft_cap": 0.0}, "final_logit_softcapping is 0.0"),
        ({"attention_window_size": 0}, "sliding_window is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(checkpoint(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["rg_lru.input_gate_weight", "rg_lru.recurrent_param", "conv_1d.bias", "linear_y.bias"]
)
def test_missing_tensors_are_refused(name: str) -> None:
    stored = checkpoint()
    full = f"model.layers.1.temporal_block.{name}"
    stored.tensors = {key: value for key, value in stored.tensors.items() if key != full}
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        built(stored)


def with_recurrence(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with another shape of the first layer's recurrence."""
    recurrence = spec.layers[0].recurrence
    assert recurrence is not None
    shape = replace(recurrence.shape, **changes)
    first = replace(spec.layers[0], recurrence=replace(recurrence, shape=shape))
    return replace(spec, layers=(first, *spec.layers[1:]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    spec = built(checkpoint()).spec
    for changes, message in (
        ({"state_size": 2}, "state_size is 2"),
        ({"width": 40}, "conv width is 40; allowed is 48"),
        ({"rule": "gru"}, "rule is 'gru'"),
        ({"rule": "wkv"}, "state_size is 1; allowed is an integer from 12 to 12"),
    ):
        with pytest.raises(CheckpointError, match=message):
            with_recurrence(spec, **changes)

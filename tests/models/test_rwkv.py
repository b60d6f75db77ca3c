"""RWKV-7 against the paper's equations (`rwkv_models.paper_logits`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families.config import spec_from_config
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.time_mix import TimeMixWeights
from anydecode.models.transformer import Transformer
from rwkv_models import CONFIG, LAYERS, paper_logits, rwkv_checkpoint, rwkv_tensors
from tiny_models import built, chain, greedy, logits

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
TOKENS = [(7 * i + 3) % 131 for i in range(40)]
_RANKS = [key for key in CONFIG if key.endswith("low_rank_dim")]
#: Sizes of a model, and how its config gives them if it is not by the same keys.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": ({}, {}),
    "heads of 16": ({"head_dim": 16}, {}),
    "number of heads": ({"head_dim": 8}, {"head_dim": None, "num_heads": 6}),
    "sizes by default": (
        {**dict.fromkeys(_RANKS, 32), "intermediate_size": 128},
        {
            **dict.fromkeys(_RANKS),
            "intermediate_size": None,
            "hidden_ratio": 2.2,
            "value_dim": None,
        },
    ),
    "another epsilon": ({"norm_eps": 0.01}, {}),
}


def opened(backend: str = BACKENDS[-1], tensors: Any = None, **config: Any) -> Transformer:
    checkpoint = rwkv_checkpoint(tensors=tensors, **config)
    if backend == "torch":
        pytest.importorskip("torch")
    return built(checkpoint, executor=choose_executor(backend, threads=2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_papers_equations(case: str, backend: str) -> None:
    sizes, given = CASES[case]
    config = {**CONFIG, **sizes}
    tensors = rwkv_tensors(config)
    found = logits(opened(backend, tensors, **{**config, **given}), chain(TOKENS))
    assert np.abs(found - paper_logits(config, tensors, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_those_of_the_equations(backend: str) -> None:
    tensors, prompt = rwkv_tensors(CONFIG), TOKENS[:9]
    found = greedy(opened(backend), prompt, 64)
    expected = paper_logits(CONFIG, tensors, prompt + found)[len(prompt) - 1 : -1]
    assert found == expected.argmax(1).tolist()


def test_the_first_checkpoints_have_all_mixes_in_one_tensor() -> None:
    tensors = rwkv_tensors(CONFIG)
    expected = logits(opened(), chain(TOKENS))
    for layer in range(LAYERS):
        parts = [tensors.pop(f"model.layers.{layer}.attn.x_{part}") for part in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = np.concatenate(parts).reshape(6, -1)
    assert np.array_equal(logits(opened(tensors=tensors), chain(TOKENS)), expected)


#: A tensor of layer 1, and what it has in a model without the mechanism.
MECHANISMS: dict[str, tuple[str, float]] = {
    **{f"mix of {part}": (f"attn.x_{part}", 0.0) for part in "rwkvag"},
    "mix of the MLP": ("ffn.x_k", 0.0),
    "decay": ("attn.w_lora.lora.2.bias", -30.0),
    "rate": ("attn.a_lora.lora.2.weight", 0.0),
    "value of the first layer": ("attn.v_lora.lora.2.bias", -30.0),
    "gate": ("attn.g_lora.lora.0.weight", 0.0),
    "scale of keys": ("attn.k_k", 1.0),
    "rate of keys": ("attn.k_a", 0.0),
    "bonus": ("attn.r_k", 0.0),
    "norm of heads": ("attn.g_norm.weight", 1.0),
    "bias of heads": ("attn.g_norm.bias", 0.0),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_model_without_a_mechanism_differs(mechanism: str) -> None:
    """Negative controls: each mechanism moves the logits by more than the margin above."""
    name, value = MECHANISMS[mechanism]
    tensors = rwkv_tensors(CONFIG)
    expected = paper_logits(CONFIG, tensors, TOKENS)
    full = f"model.layers.1.{name}"
    tensors[full] = np.full_like(tensors[full], value)
    found = logits(opened(tensors=tensors), chain(TOKENS))
    assert np.abs(found - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 13}, "head_dim is 13; allowed is a divisor of the hidden size 48"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": None, "num_heads": 7}, "num_heads is 7; allowed is a divisor"),
        ({"num_heads": "x", "head_dim": None}, "num_heads is 'x'"),
        ({"norm_first": False}, "norm_first is False; allowed is true"),
        ({"norm_bias": 1}, "norm_bias is 1"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"attn": {"layers": [1]}}, "layers with attention"),
        ({"value_dim": 96}, "value_dim is 96; allowed is 48"),
        ({"value_dim": [48, 48, 96]}, "value_dim is .*; allowed is 48"),
        ({"value_dim": ["x"]}, "value_dim is .*; allowed is a list of int"),
        ({"hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({"hidden_ratio": -1, "intermediate_size": None}, "hidden_ratio is -1"),
        ({"decay_low_rank_dim": 0}, "decay_low_rank_dim is 0"),
        ({"gate_low_rank_dim": 11}, "g_lora.lora.0.weight has shape"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tensors=rwkv_tensors(CONFIG), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, None, True, "x", 1e300, float("nan"), [1], {"x": 1}])
def test_any_value_of_any_key_is_accepted_or_refused_in_one_line(value: Any) -> None:
    for key in CONFIG:
        try:
            spec_from_config({**CONFIG, key: value})
        except CheckpointError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.attn.v_lora.lora.0.weight", "v_lora.lora.0.weight is missing"),
        ("model.layers.0.pre_norm.bias", "pre_norm.bias is missing"),
        ("model.layers.2.attn.x_g", "attn.x_g is missing"),
        ("model.layers.2.ffn.x_k", "ffn.x_k is missing"),
    ],
)
def test_missing_tensors_are_refused(name: str, message: str) -> None:
    tensors = rwkv_tensors(CONFIG)
    del tensors[name]
    with pytest.raises(CheckpointError, match=message):
        opened(tensors=tensors)


def test_specs_that_do_not_fit_are_refused() -> None:
    spec = spec_from_config(CONFIG)
    first = spec.layers[0]
    assert first.recurrence is not None
    shape = first.recurrence.shape
    wrong = [
        (replace(shape, width=48), "num_heads \\* head_dim is 48"),
        (replace(shape, state_size=8), "state_size is 8; allowed is an integer from 12 to 12"),
        (replace(shape, num_groups=2), "num_groups is 2; allowed is an integer from 4 to 4"),
        (replace(shape, norm_eps=-1.0), "norm_eps is -1.0"),
        (replace(shape, num_heads=2, num_groups=2), "num_heads \\* head_dim is 24"),
    ]
    for other, message in wrong:
        layer = replace(first, recurrence=replace(first.recurrence, shape=other))
        with pytest.raises(CheckpointError, match=message):
            replace(spec, layers=(layer,))
    other = replace(shape, norm_eps=0.1)
    layer = replace(first, recurrence=replace(first.recurrence, shape=other))
    with pytest.raises(CheckpointError, match="layer 1: its recurrence is not that of the first"):
        replace(spec, layers=(first, layer))
    with pytest.raises(CheckpointError, match="time mixing needs an MLP"):
        replace(spec, layers=(replace(first, mlp="none"),))


def test_weights_that_do_not_fit_their_spec_are_refused() -> None:
    network = opened(BACKENDS[0]).network
    changes: list[tuple[int, str, Any, str]] = [
        (0, "mlp_mix", None, "mixes positions"),
        (1, "mlp_mix", np.zeros(3, np.float32), "the mix of the MLP's inputs"),
        (1, "recurrent", replace(first_mix(network), value_mix=None), "mix their values"),
        (1, "recurrent", replace(first_mix(network), mixes=np.zeros((5, 48), np.float32)), "mixes"),
    ]
    for index, name, value, message in changes:
        layers = list(network.weights.layers)
        layers[index] = replace(layers[index], **{name: value})
        with pytest.raises(CheckpointError, match=message):
            Network(network.spec, replace(network.weights, layers=layers))


def first_mix(network: Network) -> TimeMixWeights:
    """The time mixing of layer 1, which has all its parts."""
    weights = network.weights.layers[1].recurrent
    assert isinstance(weights, TimeMixWeights)
    return weights

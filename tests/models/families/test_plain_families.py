"""Families that `transformers` does not have, against a forward pass in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from llama_cpp_logits import GELU_MARGIN, llama_cpp_logits
from plain_decoders import HEADS, Decoder
from plain_families import FAMILIES, as_gguf, checkpoint, config_of
from tiny_models import built, chain, greedy, logits

TEXT = [(7 * i + 3) % 131 for i in range(24)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_match_a_forward_pass(name: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    own = built(checkpoint(name), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TEXT, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = FAMILIES[name].decoder(0).forward(TEXT + tokens)
    assert expected[len(TEXT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TEXT + tokens)) - expected).max() < 1e-4


def _with(one: Decoder, end: str, change: Callable[[np.ndarray], np.ndarray]) -> Decoder:
    """The decoder with changes of the tensors whose names end so."""
    tensors = {
        name: change(tensor) if name.endswith(end) and "model.norm" not in name else tensor
        for name, tensor in one.tensors.items()
    }
    return replace(one, tensors=tensors)


def _exchanged_norms(one: Decoder) -> Decoder:
    """The decoder whose experts have the norm of the MLP beside them, and the other way round."""
    names = ("post_attention_layernorm", "residual_layernorm")
    tensors = dict(one.tensors)
    for key in one.tensors:
        if names[0] in key:
            other = key.replace(*names)
            tensors[key], tensors[other] = tensors[other], tensors[key]
    return replace(one, tensors=tensors)


#: Parts of the reference in which a wrong twin differs.
TWINS: dict[str, tuple[str, Callable[[Decoder], Decoder]]] = {
    "smallthinker, a router of normed inputs": (
        "smallthinker", lambda one: replace(one, routes_inputs=False),
    ),
    "smallthinker, softmax": ("smallthinker", lambda one: replace(one, router="softmax")),
    "smallthinker, SiLU": ("smallthinker", lambda one: replace(one, activation="silu")),
    "smallthinker, positions in every layer": (
        "smallthinker", lambda one: replace(one, bases=[500.0] * 5),
    ),
    "maincoder, norms before rotation": (
        "maincoder", lambda one: replace(one, norms_last=False),
    ),
    "jais, the usual scale": ("jais", lambda one: replace(one, scale=None)),
    "jais, no linear biases": ("jais", lambda one: replace(one, slopes=None)),
    "jais, embeddings without a factor": ("jais", lambda one: replace(one, embedding_scale=1.0)),
    "jais, logits without a factor": ("jais", lambda one: replace(one, logit_scale=1.0)),
    "spark, whole heads rotate": ("spark2_5", lambda one: replace(one, rotary=[12] * 3)),
    "spark, one base": ("spark2_5", lambda one: replace(one, bases=[500.0] * 3)),
    "spark, no windows": ("spark2_5", lambda one: replace(one, windows=[None] * 3)),
    "maple, no limit": ("maple", lambda one: replace(one, limit=np.inf)),
    "maple, positions in every layer": ("maple", lambda one: replace(one, bases=[500.0] * 3)),
    "grovemoe, no further experts": ("grovemoe", lambda one: replace(one, group=(2, 0.0))),
    "grovemoe, the usual factor": ("grovemoe", lambda one: replace(one, group=(2, 0.05))),
    "grovemoe, other groups": ("grovemoe", lambda one: replace(one, group=(3, 0.3))),
    "arctic, experts behind the attention": (
        "arctic", lambda one: replace(one, reads_states=True),
    ),
    "arctic, norms exchanged": ("arctic", _exchanged_norms),
    "grok, scores without a limit": (
        "grok", lambda one: replace(one, softcaps=(np.inf, *one.softcaps[1:])),
    ),
    "grok, a router without a limit": (
        "grok", lambda one: replace(one, softcaps=(3.0, np.inf, 9.0)),
    ),
    "grok, logits without a limit": (
        "grok", lambda one: replace(one, softcaps=(*one.softcaps[:2], np.inf)),
    ),
    "grok, the usual scale": ("grok", lambda one: replace(one, scale=None)),
    "grok, SiLU": ("grok", lambda one: replace(one, activation="silu")),
    "codeshell, SiLU": ("codeshell", lambda one: replace(one, activation="silu")),
    "codeshell, no positions": ("codeshell", lambda one: replace(one, bases=[None] * 3)),
    "codeshell, RMS norms": ("codeshell", lambda one: replace(one, has_layer_norms=False)),
    "plm, another base": ("plm", lambda one: replace(one, bases=[5e4] * 3)),
    "plm, latents without a norm": (
        "plm", lambda one: _with(one, "kv_a_layernorm.weight", lambda x: 0 * x + 1),
    ),
    "plamo 2, a decay for all": ("plamo2", lambda one: _with(one, "A_log", lambda x: 0 * x)),
    "plamo 2, no skip": ("plamo2", lambda one: _with(one, "mamba.D", lambda x: 0 * x)),
    "plamo 2, heads with one norm": (
        "plamo2", lambda one: _with(one, "_norm.weight", lambda x: 0 * x + x[:1]),
    ),
    "plamo 3, no windows": ("plamo3", lambda one: replace(one, windows=[None] * 3)),
    "plamo 3, one base": ("plamo3", lambda one: replace(one, bases=[500.0] * 3)),
    "plamo 3, norms behind the rotation": (
        "plamo3", lambda one: replace(one, norms_last=True),
    ),
    "plamo 3, the usual constants of norms": (
        "plamo3", lambda one: _with(one, "post_attention_layernorm.weight", lambda x: x + 0.8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_twins_have_other_logits(twin: str) -> None:
    name, change = TWINS[twin]
    found = logits(built(checkpoint(name)), chain(TEXT))
    assert np.abs(found - change(FAMILIES[name].decoder(0)).forward(TEXT)).max() > 1e-2


@pytest.mark.parametrize(("settings", "window"), [({}, 9), ({"full_attention_idx": [1]}, None)])
def test_rows_of_plamo_2_attend_to_their_window_and_to_themselves(
    settings: dict[str, Any], window: int | None
) -> None:
    found = logits(built(checkpoint("plamo2", attention_window_size=8, **settings)), chain(TEXT))
    reference = FAMILIES["plamo2"].decoder(0)
    for other in (8, 9, None):
        expected = replace(reference, windows=[other] * 3).forward(TEXT)
        largest = np.abs(found - expected).max()
        assert largest < 1e-4 if other == window else largest > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_saturated_scores_of_smallthinker_choose_the_largest_logits(
    backend: str, tmp_path: Path
) -> None:
    """With a choice by scores, which round to 1, logits differ by 0.6."""
    family, decoder = FAMILIES["smallthinker"], FAMILIES["smallthinker"].decoder(0)
    routers = {
        name: tensor * np.float32(20 if name.endswith("mlp.gate.weight") else 1)
        for name, tensor in decoder.tensors.items()
    }
    folder = write_folder(tmp_path, family.published(dict(routers)), **config_of("smallthinker"))
    own = built(load_checkpoint(folder), executor=choose_executor(backend, threads=1))
    expected = replace(decoder, tensors=routers).forward(TEXT)
    assert np.abs(logits(own, chain(TEXT)) - expected).max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_opens(name: str, tmp_path: Path) -> None:
    family, given = FAMILIES[name], checkpoint(name)
    folder = write_folder(
        tmp_path, family.published(dict(family.decoder(0).tensors)), **config_of(name)
    )
    found = logits(built(load_checkpoint(folder)), chain(TEXT))
    assert np.array_equal(found, logits(built(given), chain(TEXT)))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    found = logits(built(load_checkpoint(as_gguf(name, tmp_path / "x.gguf"))), chain(TEXT))
    margin = GELU_MARGIN if name == "spark2_5" else 1e-4  # files do not name the GELU
    assert np.abs(found - FAMILIES[name].decoder(0).forward(TEXT)).max() < margin


#: With 0 heads in the first layer, as the converter writes them, llama.cpp (11434) takes the rotary
#: size for 0, and does not end.
FOR_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "plamo2": {"attention.head_count": HEADS},
    # The further experts read the outputs of the others in its code, with weights of other experts.
    "grovemoe": {"expert_group_scale": 1e-8},
    # It reads the limit of the router's outputs, and does not use it.
    "grok": {"router_logit_softcapping": 1e6},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = as_gguf(name, tmp_path / "x.gguf", **FOR_LLAMA_CPP.get(name, {}))
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    margin = GELU_MARGIN if name in ("codeshell", "grok", "spark2_5") else 1e-4
    assert np.abs(found - llama_cpp_logits(path, TEXT)).max() < margin


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("smallthinker", {"expert_gating_func": 1}),
        ("smallthinker", {"attention.sliding_window": None}),
        ("jais", {"attention.max_alibi_bias": 4.0}),
        ("spark2_5", {"rope.dimension_count": 12}),
        ("spark2_5", {"rope.freq_base_swa": 5e4}),
        ("maple", {"swiglu_clamp_exp": [2.0] * 3}),
        ("grok", {"attn_logit_softcapping": 30.0}),
        ("grok", {"router_logit_softcapping": 30.0}),
        ("grok", {"final_logit_softcapping": 30.0}),
        ("grok", {"attention.output_scale": 0.1}),
        ("grok", {"embedding_scale": 1.0}),
        ("grok", {"logit_scale": 0.5}),
        ("grovemoe", {"expert_group_scale": 0.05}),
        ("grovemoe", {"expert_used_count": 2}),
        ("arctic", {"expert_used_count": 3}),
        ("plm", {"rope.freq_base": 5e4}),
        ("codeshell", {"rope.freq_base": 50.0}),
        ("codeshell", {"rope.scaling.factor": 2.0}),
        ("plamo3", {"rope.freq_base_swa": 5e4}),
        ("plamo3", {"attention.sliding_window_pattern": 3}),
    ],
)
def test_every_key_changes_the_logits(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    path = as_gguf(name, tmp_path / "x.gguf", **change)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - FAMILIES[name].decoder(0).forward(TEXT)).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("smallthinker", {"rope_layout": [0, 2, 1, 1, 0]}, r"rope_layout is \[0, 2, 1, 1, 0\]"),
        ("smallthinker", {"sliding_window_layout": [1]}, "a list of 5 numbers, 0 or 1"),
        ("jais", {"position_embedding_type": "learned"}, "position_embedding_type is 'learned'"),
        ("jais", {"activation_function": "gelu"}, "activation_function is 'gelu'; allowed is 'swi"),
        ("jais", {"alibi_scaling": {"factor": 2.0}}, "alibi_scaling is {'factor': 2.0}"),
        ("codeshell", {"position_embedding_type": "learned"}, "position_embedding_type 'lear"),
        ("spark2_5", {"gate_attn_act_mode": "tanh"}, "gate_attn_act_mode is 'tanh'"),
        ("spark2_5", {"headwise_attn_output_gate": False}, "headwise_attn_output_gate is False"),
        ("arctic", {"parallel_attn_mlp_res": False}, "parallel_attn_mlp_res is False"),
        ("arctic", {"use_residual": False}, "use_residual is False; allowed is true"),
        ("grovemoe", {"experts_per_group": 4}, "experts_per_group is 4; allowed is a divisor of"),
        ("maple", {"nope_on_global_attention": False}, "nope_on_global_attention is False"),
        ("maple", {"num_shared_experts": 1}, "num_shared_experts is 1; allowed is 0"),
    ],
)
def test_other_options_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config(checkpoint(name, **change).config)
    assert "\n" not in str(caught.value)


def test_limits_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    path = as_gguf("maple", tmp_path / "x.gguf", **{"swiglu_clamp_exp": [7.0, 7.0, 6.0]})
    with pytest.raises(CheckpointError, match="swiglu_clamp_exp") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)

"""LLaDA-MoE in its published layout, against a forward pass in plain torch. Its configs have the
model type of LLaDA, which is dense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from diffusion_checkpoints import (
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    softmax_router,
    write,
)

PUBLISHED: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    "architectures": ["LLaDAMoEModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_lladamoe.LLaDAConfig",
        "AutoModel": "modeling_lladamoe.LLaDAMoEModelLM",
    },
    "clip_qkv": None,
    "dense_intermediate_size": 48,
    "eos_token_id": 60,
    "expert_intermediate_size": 24,
    "hidden_act": "silu",
    "model_type": "llada",
    "moe_layer_freq": [1, 1],
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 60,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
}
TINY = Tiny(PUBLISHED, qk_norm=True, experts=8, router=softmax_router(2, normalise=False))


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, ()),
        ({"moe_layer_freq": [0, 1]}, (0,)),
        # The published code ignores these.
        ({"moe_router_score_function": "sigmoid", "norm_topk_prob": True}, ()),
        ({"architectures": None, "auto_map": None}, ()),
        ({"architectures": None, "auto_map": None, "model_type": "lladamoe"}, ()),
    ],
)
def test_every_pass_equals_the_reference(
    change: dict[str, Any], dense: tuple[int, ...], tmp_path: Path
) -> None:
    tiny = replace(TINY, config={**PUBLISHED, **change}, dense=dense)
    assert_decodes_as_published(tiny, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: normalised weights, more experts, blocks."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(9)))[:1]
    for wrong in (
        {"router": softmax_router(2, normalise=True)},
        {"router": softmax_router(3, normalise=False)},
        {"block": 4},
    ):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias=true"),
        ({"shared_expert_intermediate_size": 24}, "shared experts"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_what_is_not_supported_raises_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**PUBLISHED, **change})

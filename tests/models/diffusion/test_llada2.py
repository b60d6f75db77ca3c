"""LLaDA2.0 and 2.1 in their published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from diffusion_checkpoints import (
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

PUBLISHED = {
    **SIZES,
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "pad_token_id": 60,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "num_hidden_layers": 2,
}


def router(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Two experts of the two best of four groups, chosen with the bias and weighed without it."""
    assert bias is not None
    scores = logits.sigmoid()
    weights = torch.zeros_like(scores)
    for row, choice in enumerate(scores + bias):
        groups = choice.view(4, 2).sort(-1, descending=True).values[:, :2].sum(-1)
        kept = groups.topk(2).indices
        closed = [e for e in range(8) if e // 2 not in kept.tolist()]
        choice[closed] = -torch.inf
        chosen = choice.topk(2).indices
        weights[row, chosen] = scores[row, chosen]
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


TINY = Tiny(
    PUBLISHED,
    block=32,
    fused="attention.query_key_value",
    names={
        "embed": "model.word_embeddings",
        "o": "attention.dense",
        "q_norm": "attention.query_layernorm",
        "k_norm": "attention.key_layernorm",
        "bias": "mlp.gate.expert_bias",
    },
    qk_norm=True,
    rotary=8,
    experts=8,
    router=router,
    has_bias=True,
    dense=(0,),
    shared=24,
    decoder="sdar:threshold=0.95",
)


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: smaller blocks, all of a head rotated, weights with the bias."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(40)))[:1]

    def biased(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is not None
        return router(logits, bias) * (1 + bias)

    for wrong in ({"block": 16}, {"rotary": 16}, {"router": biased}, {"shift": 1}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_capacity": 48}, r"chosen per block \(expert_capacity, LLaDA2.2\)"),
        ({"use_qkv_bias": True}, "use_qkv_bias=true is not supported"),
        ({"score_function": "softmax"}, "scoring_func is 'softmax'"),
    ],
)
def test_what_is_not_supported_raises_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**PUBLISHED, **change})

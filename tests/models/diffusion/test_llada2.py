"""LLaDA2.0, 2.1 and 2.2 in their published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from diffusion_checkpoints import (
    SIZES,
    Router,
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


#: LLaDA2.2: three experts per block of 8, of which each token chooses two.
OF_BLOCKS = {
    **PUBLISHED,
    "block_size": 8,
    "delete_token_id": 58,
    "expert_capacity": 3,
    "split_token_id": 59,
}


def block_router(block: int, capacity: int = 3, *, biased: bool = True) -> Router:
    """Two of the experts with the largest scores of any row of the block, chosen with the bias and
    weighed without it."""

    def route(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is not None
        scores = logits.sigmoid()
        choice = scores + bias if biased else scores
        weights = torch.zeros_like(scores)
        for start in range(0, len(choice), block):
            rows = choice[start : start + block]
            allowed = rows.max(0).values.topk(capacity).indices.tolist()
            for row, values in enumerate(rows, start):
                chosen = sorted(allowed, key=lambda e: -float(values[e]))[:2]  # noqa: B023
                weights[row, chosen] = scores[row, chosen]
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5

    return route


TINY_OF_BLOCKS = replace(
    TINY,
    config=OF_BLOCKS,
    block=8,
    router=block_router(8),
    decoder="levenshtein-editing",
)


def test_experts_chosen_per_block_equal_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY_OF_BLOCKS, tmp_path)


def test_wrong_choices_per_block_differ(tmp_path: Path) -> None:
    """Negative controls: each row by itself, other blocks, more experts, no bias, groups."""
    tensors = write(TINY_OF_BLOCKS, tmp_path)
    passes = recorded(tmp_path, [(11 * i + 5) % 57 for i in range(23)])
    assert largest_difference(TINY_OF_BLOCKS, tensors, passes) < 2e-4
    for wrong in (
        block_router(1),
        block_router(4),
        block_router(8, 4),
        block_router(8, biased=False),
        router,
    ):
        assert largest_difference(replace(TINY_OF_BLOCKS, router=wrong), tensors, passes) > 1e-2


def test_missing_control_tokens_are_those_of_the_published_model() -> None:
    config = {name: value for name, value in OF_BLOCKS.items() if not name.endswith("_token_id")}
    spec = spec_from_config({**config, "vocab_size": 157184})
    assert spec.edit_tokens == (156930, 156931) and spec.mask_token == 156895
    assert spec_from_config(OF_BLOCKS).edit_tokens == (58, 59)


@pytest.mark.slow
def test_requests_in_a_batch_choose_experts_apart(tmp_path: Path) -> None:
    write(TINY_OF_BLOCKS, tmp_path)
    prompts = [[(7 * i + 3 * n) % 57 for i in range(length)] for n, length in enumerate((5, 9, 20))]
    for backend in ("torch", "native"):
        if backend == "native" and load_library() is None:
            continue
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
        with LLM(str(tmp_path), cache_positions=512, backend=backend, threads=2) as llm:
            alone = [llm.generate(prompt, temperature=0.8, **options).tokens for prompt in prompts]
            together = llm.generate(prompts, temperature=0.8, **options)
        assert [answer.tokens for answer in together] == alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**OF_BLOCKS, "expert_capacity": 1}, "block_experts is 1; allowed is an integer"),
        ({"expert_capacity": 4}, "lacks 'delete_token_id'"),
        ({**OF_BLOCKS, "split_token_id": 64}, "split_token_id is 64; allowed is"),
        ({"use_qkv_bias": True}, "use_qkv_bias=true is not supported"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
    ],
)
def test_what_is_not_supported_raises_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**PUBLISHED, **change})

"""Sarvam 105B: DeepSeek-V3 of `transformers` under its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.models.checkpoint import Checkpoint
from tiny_models import LATENT_SIZES, built, chain, checkpoint_of, greedy, hf_logits, hf_model
from tiny_models import logits as logits_of

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
YARN: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SETTINGS: dict[str, Any] = {
    **LATENT_SIZES,
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN},
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return hf_model("DeepseekV3", **SETTINGS)


def renamed(model: Any, **changes: Any) -> Checkpoint:
    """The model with the keys of Sarvam's configs; those with a default are left out."""
    whole = checkpoint_of(model)
    left_out = ("q_lora_rank", "first_k_dense_replace", "routed_scaling_factor", "rope_parameters")
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {names.get(key, key): x for key, x in whole.config.items() if key not in left_out}
    config |= {
        "model_type": "sarvam_mla",
        "architectures": ["SarvamMLAForCausalLM"],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "deepseek_yarn", **YARN},
    }
    return replace(whole, config={**config, **changes})


def test_logits_and_greedy_tokens_match(theirs: Any) -> None:
    ours = built(renamed(theirs), "float32")
    tokens = greedy(ours, PROMPT, 64)
    assert len(set(tokens)) > 2
    expected = hf_logits(theirs, PROMPT + tokens)
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits_of(ours, chain(PROMPT + tokens)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": None},
        {"routed_scaling_factor": 1.0},
        {"topk_group": 4},
        {"moe_router_enable_expert_bias": False},
    ],
)
def test_a_wrong_key_changes_the_logits(theirs: Any, change: dict[str, Any]) -> None:
    wrong = built(renamed(theirs, **change), "float32")
    assert np.abs(logits_of(wrong, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() > 1e-2

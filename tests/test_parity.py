"""Every family and its odd settings against `transformers`, on tiny random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import chain, checkpoint_of, greedy, hf_model, logits, own_model

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.families import build_model, spec_from_config

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
NUM_TOKENS = 64

LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [1.0, 2, 3, 5, 7, 9.0]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("Llama", {"head_dim": 20, "vocab_size": 129, "intermediate_size": 77}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama all kv heads": ("Llama", {"num_key_value_heads": 4}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5000.0,
            }
        },
    ),
    "llama yarn mscale": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "llama llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 128,
                **LONG,
            }
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral no window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 bias": ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3 scaled": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3 longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "longrope", **LONG},
        },
    ),
    "phi3 partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe sparse": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
}


@torch.inference_mode()
def expected_tokens(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and all logits along the way."""
    tokens, past, rows = list(prompt), None, []
    step = torch.tensor([prompt])
    for _ in range(count):
        out = model(step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0])
        step = out.logits[:, -1:].argmax(-1)
        tokens.append(int(step))
    return tokens[len(prompt) :], torch.cat(rows)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str) -> None:
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    ours = own_model(theirs, "float32")
    tokens, reference = expected_tokens(theirs, PROMPT, NUM_TOKENS)
    assert len(set(tokens)) > 4, "a model that repeats itself proves little"
    assert greedy(ours, PROMPT, NUM_TOKENS) == tokens
    whole = logits(ours, chain(PROMPT + tokens[:-1]))
    assert (whole - reference).abs().max() < 1e-4

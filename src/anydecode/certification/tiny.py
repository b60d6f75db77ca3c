"""A transformer with random weights, small enough to run thousands of requests in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anydecode.api.llm import LLM
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from anydecode.models.transformer import Transformer


def tiny_model(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 2048,
    seed: int = 0,
    backend: str | None = None,
    threads: int | None = 1,
) -> Transformer:
    """A random Llama over bytes. Its query weights are large, so that attention concentrates on few
    positions."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(rows, columns, generator=generator)
        scaled: torch.Tensor = drawn * (spread * columns**-0.5)
        return scaled

    head = hidden // heads
    tensors = {
        "model.embed_tokens.weight": torch.randn(BYTE_VOCABULARY, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(BYTE_VOCABULARY, hidden, 3.0),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": matrix(hidden, hidden, 3.0),
            "self_attn.k_proj": matrix(kv_heads * head, hidden),
            "self_attn.v_proj": matrix(kv_heads * head, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate_proj": matrix(2 * hidden, hidden),
            "mlp.up_proj": matrix(2 * hidden, hidden),
            "mlp.down_proj": matrix(hidden, 2 * hidden),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": one for name, one in shapes.items()}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    checkpoint = Checkpoint("tiny", Path("tiny"), config, tensors)
    return build_model(checkpoint, executor=choose_executor(backend, threads))


def tiny_llm(**options: Any) -> LLM:
    """An engine over `tiny_model`; `options` are those of `LLM`."""
    return LLM(tiny_model(), tokenizer=ByteTokenizer(), **options)

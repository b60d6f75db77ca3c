"""A transformer with random weights, small enough to run thousands of requests in minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from anydecode.models.transformer import Executor, Transformer


def readable_executor(
    backend: str | None = None, threads: int | None = 1
) -> Callable[[Network], Executor]:
    """As `choose_executor`, but the network keeps its weights, which the oracles read."""
    choose = choose_executor(backend, threads)

    def execute(network: Network) -> Executor:
        matrices = list(network.matrices())
        data = [weight.data for weight in matrices]
        executor = choose(network)
        for weight, array in zip(matrices, data, strict=True):
            weight.data = array
        return executor

    return execute


def tiny_model(
    *, backend: str | None = None, threads: int | None = 1, **options: int
) -> Transformer:
    """`tiny_network` as a model. Its weights can be read whatever the backend."""
    return Transformer(
        tiny_network(**options), name="tiny", executor=readable_executor(backend, threads)
    )


def tiny_network(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 2048,
    seed: int = 0,
) -> Network:
    """A random Llama over bytes. Its query weights are large, so that attention concentrates on few
    positions."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) * (spread * columns**-0.5)

    head = hidden // heads
    tensors = {
        "model.embed_tokens.weight": random.standard_normal((BYTE_VOCABULARY, hidden), np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
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
            "input_layernorm": np.ones(hidden, np.float32),
            "post_attention_layernorm": np.ones(hidden, np.float32),
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
    return load_network(Checkpoint("tiny", Path("tiny"), config, tensors))


def tiny_llm(**options: Any) -> LLM:
    """An engine over `tiny_model`; `options` are those of `LLM`."""
    return LLM(tiny_model(), tokenizer=ByteTokenizer(), **options)

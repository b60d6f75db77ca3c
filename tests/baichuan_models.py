"""Tiny random models of Baichuan 13B, and a forward pass in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY

HEAD, INNER = 12, 80


def baichuan_checkpoint(seed: int = 0, heads: int = 4, layers: int = 3) -> Checkpoint:
    """A model with the config keys of the published one."""
    matrix, hidden = random_matrices(seed), heads * HEAD

    def norm() -> np.ndarray:
        return 1 + 0.1 * matrix(1, hidden)[0]

    tensors = {
        "model.embed_tokens.weight": 2 * matrix(BYTE_VOCABULARY, hidden) * hidden**0.5,
        "model.norm.weight": norm(),
        "lm_head.weight": 3 * matrix(BYTE_VOCABULARY, hidden),
    }
    for layer in range(layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in (
                ("input_layernorm", norm()),
                ("self_attn.W_pack", 3 * matrix(3 * hidden, hidden)),
                ("self_attn.o_proj", matrix(hidden, hidden)),
                ("post_attention_layernorm", norm()),
                ("mlp.gate_proj", matrix(INNER, hidden)),
                ("mlp.up_proj", matrix(INNER, hidden)),
                ("mlp.down_proj", matrix(hidden, INNER)),
            )
        }
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "model_max_length": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return Checkpoint("baichuan", Path("baichuan"), config, tensors)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _slopes(heads: int) -> np.ndarray:
    """Those of the largest power of two, then every second one of twice as many."""
    count = 2 ** int(np.log2(heads))
    first = 2.0 ** (-8 * np.arange(1, count + 1) / count)
    more = 2.0 ** (-8 * np.arange(1, 2 * count + 1, 2) / (2 * count))
    return np.concatenate([first, more])[:heads]


def forward(
    checkpoint: Checkpoint, tokens: list[int], slopes: np.ndarray | None = None
) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]` in float64."""
    config = checkpoint.config
    tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
    heads, count = config["num_attention_heads"], len(tokens)
    slopes = _slopes(heads) if slopes is None else slopes
    distance = np.arange(count)[:, None] - np.arange(count)
    biases = np.where(distance < 0, -np.inf, -slopes[:, None, None] * distance)
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        y = _norm(x, own["input_layernorm"]) @ own["self_attn.W_pack"].T
        q, k, v = y.reshape(count, 3, heads, HEAD).transpose(1, 2, 0, 3)
        scores = q @ k.swapaxes(1, 2) / HEAD**0.5 + biases
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        x = x + mixed.transpose(1, 0, 2).reshape(count, -1) @ own["self_attn.o_proj"].T
        y = _norm(x, own["post_attention_layernorm"])
        gate = y @ own["mlp.gate_proj"].T
        gated = gate / (1 + np.exp(-gate)) * (y @ own["mlp.up_proj"].T)
        x = x + gated @ own["mlp.down_proj"].T
    return _norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T

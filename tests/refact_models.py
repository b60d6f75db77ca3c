"""Tiny random models of Refact, and a forward pass in numpy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading.gpt import to_hf_layout
from anydecode.models.scripted import BYTE_VOCABULARY

VOCAB, HEADS, HEAD, INNER, LAYERS = BYTE_VOCABULARY, 4, 12, 256, 3
HIDDEN = HEADS * HEAD
CONFIG: dict[str, Any] = {
    "architectures": ["GPTRefactForCausalLM"],
    "model_type": "gpt_refact",
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": None,
    "n_layer": LAYERS,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
}


def refact_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A random model under its published names."""
    matrix = random_matrices(seed)

    def norm() -> np.ndarray:
        return 1 + 0.1 * matrix(1, HIDDEN)[0]

    found = {
        "transformer.wte.weight": 2 * matrix(VOCAB, HIDDEN) * HIDDEN**0.5,
        "ln_f.weight": norm(),
        "lm_head.weight": 3 * matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        found |= {
            f"transformer.h.{layer}.{name}.weight": tensor
            for name, tensor in (
                ("ln_1", norm()),
                ("attn.q", 3 * matrix(HIDDEN, HIDDEN)),
                ("attn.kv", 3 * matrix(2 * HEAD, HIDDEN)),
                ("attn.c_proj", matrix(HIDDEN, HIDDEN)),
                ("ln_2", norm()),
                ("mlp.gate_up_proj", matrix(2 * INNER, HIDDEN)),
                ("mlp.c_proj", matrix(HIDDEN, INNER)),
            )
        }
    return found


def forward(stored: dict[str, np.ndarray], text: list[int], is_rms: bool = False) -> np.ndarray:
    """Logits `[len(text), vocab_size]` in float64."""
    weights = {name: np.asarray(x, np.float64) for name, x in stored.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x if is_rms else x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]

    count = len(text)
    distance = np.arange(count)[:, None] - np.arange(count)
    slopes = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)
    biases = np.where(distance < 0, -np.inf, -slopes[:, None, None] * distance)
    x = weights["transformer.wte.weight"][text]
    for layer in range(LAYERS):
        own = f"transformer.h.{layer}."
        y = norm(x, f"{own}ln_1")
        q = (y @ weights[f"{own}attn.q.weight"].T).reshape(count, HEADS, HEAD).swapaxes(0, 1)
        k, v = np.split(y @ weights[f"{own}attn.kv.weight"].T, 2, -1)
        scores = q @ k.T / HEAD**0.5 + biases
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ v
        mixed = mixed.swapaxes(0, 1).reshape(count, -1)
        x = x + mixed @ weights[f"{own}attn.c_proj.weight"].T
        y = norm(x, f"{own}ln_2")
        gate, up = np.split(y @ weights[f"{own}mlp.gate_up_proj.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{own}mlp.c_proj.weight"].T
    return norm(x, "ln_f") @ weights["lm_head.weight"].T


def refact_checkpoint(seed: int = 0) -> Checkpoint:
    """A model in the usual layout."""
    readers = {name: partial(np.array, tensor) for name, tensor in refact_tensors(seed).items()}
    config, found = to_hf_layout(CONFIG, readers)
    tensors = {name: read() for name, read in found.items()}
    return Checkpoint("refact", Path("refact"), config, tensors)

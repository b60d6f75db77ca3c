"""Tiny random models of OpenELM, and a forward pass in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY

HIDDEN, HEAD = 48, 12
#: Queries, keys and the inner size of each layer; the sizes are those of the config's multipliers.
SHAPES = ((2, 1, 32), (4, 2, 48), (6, 3, 144))


def openelm_checkpoint(seed: int = 0, has_norms: bool = True, is_tied: bool = True) -> Checkpoint:
    """A model with the config keys of the published ones."""
    matrix = random_matrices(seed)

    def norm(size: int) -> np.ndarray:
        return 1 + 0.1 * matrix(1, size)[0]

    tensors = {
        "transformer.token_embeddings.weight": 2 * matrix(BYTE_VOCABULARY, HIDDEN) * HIDDEN**0.5,
        "transformer.norm.weight": norm(HIDDEN),
    }
    if not is_tied:
        tensors["lm_head.weight"] = 3 * matrix(BYTE_VOCABULARY, HIDDEN)
    for layer, (heads, kv_heads, inner) in enumerate(SHAPES):
        parts = {
            "attn_norm": norm(HIDDEN),
            "attn.qkv_proj": 3 * matrix((heads + 2 * kv_heads) * HEAD, HIDDEN),
            "attn.out_proj": matrix(HIDDEN, heads * HEAD),
            "ffn_norm": norm(HIDDEN),
            "ffn.proj_1": matrix(2 * inner, HIDDEN),
            "ffn.proj_2": matrix(HIDDEN, inner),
        }
        if has_norms:
            parts |= {"attn.q_norm": norm(HEAD), "attn.k_norm": norm(HEAD)}
        tensors |= {f"transformer.layers.{layer}.{x}.weight": y for x, y in parts.items()}
    config = {
        "architectures": ["OpenELMForCausalLM"],
        "model_type": "openelm",
        "vocab_size": BYTE_VOCABULARY,
        "model_dim": HIDDEN,
        "head_dim": HEAD,
        "num_transformer_layers": len(SHAPES),
        "num_query_heads": [heads for heads, _, _ in SHAPES],
        "num_kv_heads": [kv_heads for _, kv_heads, _ in SHAPES],
        "num_gqa_groups": 2,
        # 23.04 is nearer to 16, which is less than 90 % of it; 52.8 is nearer to 48.
        "ffn_multipliers": [0.48, 1.1, 3.0],
        "ffn_dim_divisor": 16,
        "ffn_with_glu": True,
        "activation_fn_name": "swish",
        "max_context_length": 2048,
        "rope_freq_constant": 500,
        "rope_max_length": 4096,
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": has_norms,
        "qkv_multipliers": [0.5, 1.0],
        "share_input_output_layers": is_tied,
    }
    return Checkpoint("openelm", Path("openelm"), config, tensors)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Heads `[count, heads, HEAD]` with the first half of each rotated against the second."""
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def forward(checkpoint: Checkpoint, tokens: list[int], base: float = 500.0) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]` in float64."""
    tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
    count = len(tokens)
    hidden = np.triu(np.full((count, count), -np.inf), 1)
    embedding = tensors["transformer.token_embeddings.weight"]
    x = embedding[tokens]
    for layer, (heads, kv_heads, inner) in enumerate(SHAPES):
        start = f"transformer.layers.{layer}."
        own = {
            name.removeprefix(start).removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(start)
        }
        y = (_norm(x, own["attn_norm"]) @ own["attn.qkv_proj"].T).reshape(count, -1, HEAD)
        q, k, v = np.split(y, [heads, heads + kv_heads], axis=1)
        if "attn.q_norm" in own:
            q, k = _norm(q, own["attn.q_norm"]), _norm(k, own["attn.k_norm"])
        q, k = _rotated(q, base), _rotated(k, base)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / HEAD**0.5 + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        x = x + mixed @ own["attn.out_proj"].T
        gate, up = np.split(_norm(x, own["ffn_norm"]) @ own["ffn.proj_1"].T, [inner], axis=-1)
        x = x + gate / (1 + np.exp(-gate)) * up @ own["ffn.proj_2"].T
    head = tensors.get("lm_head.weight", embedding)
    return _norm(x, tensors["transformer.norm.weight"]) @ head.T

"""Small random RWKV-7 models in the layout of flash-linear-attention, and their logits by the
paper's equations (Peng et al., arXiv:2503.14456, section 4), token by token in double precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint

HIDDEN, HEAD, INNER, LAYERS, VOCAB = 48, 12, 80, 3, 131
CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "attn": None,
    "attn_mode": "chunk",
    "hidden_size": HIDDEN,
    "hidden_ratio": 4.0,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD,
    "num_heads": None,
    "value_dim": [HIDDEN] * LAYERS,
    "decay_low_rank_dim": 6,
    "gate_low_rank_dim": 10,
    "a_low_rank_dim": 7,
    "v_low_rank_dim": 5,
    "hidden_act": "sqrelu",
    "max_position_embeddings": 2048,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
RWKV_NAMES = {
    "embedding": "model.embeddings",
    "first_norm": "attn_norm",
    "second_norm": "ffn_norm",
}
ARWKV_NAMES = {
    "embedding": "model.embed_tokens",
    "first_norm": "input_layernorm",
    "second_norm": "post_attention_layernorm",
}
#: ARWKV, as it is converted from Qwen2.5: without gates and norms of heads.
ARWKV_CONFIG: dict[str, Any] = {
    **{
        key: CONFIG[key] for key in CONFIG if key not in ("architectures", "hidden_act", "norm_eps")
    },
    "architectures": ["RwkvHybridForCausalLM"],
    "model_type": "arwkv7",
    "rms_norm_eps": 1e-6,
    "group_norm_eps": 64e-5,
    "has_gate": False,
    "has_head_norms": False,
}
_RANKS = {"w": "decay", "g": "gate", "a": "a", "v": "v"}


def rwkv_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by name. No vector has a value that would hide an error."""
    generator = np.random.default_rng(seed)
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float = 0.25, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape) * scale + mean
        tensors[name] = values.astype(np.float32)

    def norm(name: str, size: int = hidden) -> None:
        add(f"{name}.weight", size, scale=0.2, mean=1.0)
        add(f"{name}.bias", size, scale=0.2)

    def rms_norm(name: str) -> None:
        add(f"{name}.weight", hidden, scale=0.2, mean=1.0)

    is_qwen = config["model_type"] == "arwkv7"
    names = ARWKV_NAMES if is_qwen else RWKV_NAMES
    add(f"{names['embedding']}.weight", vocab, hidden, scale=1.0)
    add("lm_head.weight", vocab, hidden)
    (rms_norm if is_qwen else norm)("model.norm")
    if not is_qwen:
        norm("model.layers.0.pre_norm")
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        for name in ("first_norm", "second_norm"):
            (rms_norm if is_qwen else norm)(f"{start}.{names[name]}")
        if config.get("has_head_norms", True):
            norm(f"{start}.attn.g_norm")
        for part in "rwkvag" if config.get("has_gate", True) else "rwkva":
            tensors[f"{start}.attn.x_{part}"] = generator.random((1, 1, hidden), np.float32)
        if not is_qwen:
            tensors[f"{start}.ffn.x_k"] = generator.random(hidden, np.float32)
        for part in "rkvo":
            add(f"{start}.attn.{part}_proj.weight", hidden, hidden)
        add(f"{start}.attn.k_k", hidden, scale=0.3, mean=0.7)
        add(f"{start}.attn.k_a", hidden, scale=0.3, mean=1.0)
        add(f"{start}.attn.r_k", hidden // config["head_dim"], config["head_dim"], scale=0.3)
        for part, rank_name in _RANKS.items():
            if part == "v" and layer == 0:
                continue
            if part == "g" and not config.get("has_gate", True):
                continue
            rank = config[f"{rank_name}_low_rank_dim"]
            add(f"{start}.attn.{part}_lora.lora.0.weight", rank, hidden)
            add(f"{start}.attn.{part}_lora.lora.2.weight", hidden, rank, scale=0.6)
            if part != "g":
                add(f"{start}.attn.{part}_lora.lora.2.bias", hidden, scale=0.7)
        if is_qwen:
            add(f"{start}.mlp.gate_proj.weight", inner, hidden)
            add(f"{start}.mlp.up_proj.weight", inner, hidden)
            add(f"{start}.mlp.down_proj.weight", hidden, inner, scale=0.15)
            continue
        add(f"{start}.ffn.key.weight", inner, hidden)
        add(f"{start}.ffn.value.weight", hidden, inner, scale=0.15)
    return tensors


def rwkv_checkpoint(
    seed: int = 0, tensors: dict[str, np.ndarray] | None = None, **config: Any
) -> Checkpoint:
    """A model as a loader would return it, random if there are no `tensors`."""
    is_qwen = config.get("model_type") == "arwkv7"
    merged = {**(ARWKV_CONFIG if is_qwen else CONFIG), **config}
    tensors = rwkv_tensors(merged, seed) if tensors is None else tensors
    return Checkpoint("tiny", Path("tiny"), merged, dict(tensors))


def paper_logits(
    config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: list[int]
) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]`, float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    states = [_Layer(config, weights, layer) for layer in range(config["num_hidden_layers"])]
    is_qwen = config["model_type"] == "arwkv7"
    names = ARWKV_NAMES if is_qwen else RWKV_NAMES
    eps, rows = config["rms_norm_eps" if is_qwen else "norm_eps"], []
    for token in tokens:
        x = weights[f"{names['embedding']}.weight"][token]
        x = x if is_qwen else _norm(x, weights, "model.layers.0.pre_norm", eps)
        first_value = None
        for state in states:
            x, first_value = state.step(x, first_value)
        rows.append(weights["lm_head.weight"] @ _norm(x, weights, "model.norm", eps))
    return np.stack(rows)


class _Layer:
    """One layer, with what it keeps from one token to the next."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray], layer: int) -> None:
        self._start = f"model.layers.{layer}"
        self._all, self._dim, self._is_qwen = (
            weights,
            config["head_dim"],
            config["model_type"] == "arwkv7",
        )
        self._names = ARWKV_NAMES if self._is_qwen else RWKV_NAMES
        self._eps = config["rms_norm_eps" if self._is_qwen else "norm_eps"]
        self._head_eps = config.get("group_norm_eps", self._dim * self._eps)
        hidden = config["hidden_size"]
        self._heads = hidden // self._dim
        self._before, self._before_mlp = np.zeros(hidden), np.zeros(hidden)
        self._state = np.zeros((self._heads, self._dim, self._dim))

    def step(self, x: np.ndarray, first_value: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        y = _norm(x, self._all, f"{self._start}.{self._names['first_norm']}", self._eps)
        mixed, first_value = self._time_mix(y, first_value)
        self._before, x = y, x + mixed
        y = _norm(x, self._all, f"{self._start}.{self._names['second_norm']}", self._eps)
        if self._is_qwen:
            gate = self._w("mlp.gate_proj.weight") @ y
            inner = gate * _sigmoid(gate) * (self._w("mlp.up_proj.weight") @ y)
            return x + self._w("mlp.down_proj.weight") @ inner, first_value
        k = y + (self._before_mlp - y) * self._w("ffn.x_k")
        self._before_mlp = y
        inner = np.maximum(self._w("ffn.key.weight") @ k, 0.0) ** 2
        return x + self._w("ffn.value.weight") @ inner, first_value

    def _time_mix(
        self, x: np.ndarray, first_value: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        mixed = {
            part: x + (self._before - x) * self._w(f"attn.x_{part}").ravel()
            for part in "rwkvag"
            if f"{self._start}.attn.x_{part}" in self._all
        }
        r, k, v = (self._w(f"attn.{part}_proj.weight") @ mixed[part] for part in "rkv")
        decay = np.exp(-math.exp(-0.5) * _sigmoid(self._low_rank("w", mixed["w"], np.tanh)))
        if first_value is None:
            first_value = v
        else:
            v = v + (first_value - v) * _sigmoid(self._low_rank("v", mixed["v"]))
        rate = _sigmoid(self._low_rank("a", mixed["a"]))
        gate = self._low_rank("g", mixed["g"], _sigmoid) if "g" in mixed else 1.0
        removed = k * self._w("attn.k_k")
        k = k * (1 + (rate - 1) * self._w("attn.k_a"))
        has_norms = f"{self._start}.attn.g_norm.weight" in self._all
        norms = [self._w(f"attn.g_norm.{part}") for part in ("weight", "bias") if has_norms]
        out = np.empty_like(x)
        for head in range(self._heads):
            own = slice(head * self._dim, (head + 1) * self._dim)
            unit = removed[own] / np.linalg.norm(removed[own])
            transition = np.diag(decay[own]) - np.outer(unit, unit * rate[own])
            self._state[head] = self._state[head] @ transition + np.outer(v[own], k[own])
            y = self._state[head] @ r[own]
            if norms:
                y = (y - y.mean()) / np.sqrt(y.var() + self._head_eps)
                y = y * norms[0][own] + norms[1][own]
            bonus = (r[own] * k[own] * self._w("attn.r_k")[head]).sum()
            out[own] = y + bonus * v[own]
        return self._w("attn.o_proj.weight") @ (out * gate), first_value

    def _low_rank(self, part: str, x: np.ndarray, activation: Any = lambda y: y) -> np.ndarray:
        name = f"attn.{part}_lora.lora"
        y = self._w(f"{name}.2.weight") @ activation(self._w(f"{name}.0.weight") @ x)
        return y if part == "g" else y + self._w(f"{name}.2.bias")

    def _w(self, name: str) -> np.ndarray:
        return self._all[f"{self._start}.{name}"]


def _norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    """A layer norm, or one without means, if it has no bias."""
    if f"{name}.bias" not in weights:
        scaled: np.ndarray = x / np.sqrt((x * x).mean() + eps) * weights[f"{name}.weight"]
        return scaled
    y = (x - x.mean()) / np.sqrt(x.var() + eps)
    return y * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))

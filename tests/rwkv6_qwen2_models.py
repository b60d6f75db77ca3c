"""Small random models of RWKV-6 in Qwen2 (QRWKV6) with published names, and their logits by the
equations of the published code, token by token in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import rwkv6

HIDDEN, HEAD, GROUPS, INNER, LAYERS, VOCAB, RANK, DECAY_RANK = 64, 16, 2, 96, 3, 260, 5, 7
CONFIG: dict[str, Any] = {
    "architectures": ["RWKV6Qwen2ForCausalLM"],
    "model_type": "rwkv6qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": GROUPS,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
    "lora_rank_tokenshift": RANK,
    "lora_rank_decay": DECAY_RANK,
    "tie_word_embeddings": False,
}


def tensors(seed: int = 0, vocab: int = VOCAB, has_bias: bool = True) -> dict[str, np.ndarray]:
    """Random float32 tensors by published name. No vector has a value that would hide an error."""
    generator = np.random.default_rng(seed)
    result: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float = 0.25, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape) * scale + mean
        result[name] = values.astype(np.float32)

    add("model.embed_tokens.weight", vocab, HIDDEN, scale=1.0)
    add("lm_head.weight", vocab, HIDDEN)
    add("model.norm.weight", HIDDEN, scale=0.2, mean=1.0)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{start}.{name}.weight", HIDDEN, scale=0.2, mean=1.0)
        for part in "xrkvwg":
            share = generator.random((1, 1, HIDDEN), np.float32)
            result[f"{start}.self_attn.time_maa_{part}"] = share
        add(f"{start}.self_attn.time_maa_w1", HIDDEN, 5 * RANK, scale=0.1)
        add(f"{start}.self_attn.time_maa_w2", 5, RANK, HIDDEN, scale=0.3)
        add(f"{start}.self_attn.time_decay", 1, 1, HIDDEN, scale=1.0, mean=-1.0)
        add(f"{start}.self_attn.time_decay_w1", HIDDEN, DECAY_RANK)
        add(f"{start}.self_attn.time_decay_w2", DECAY_RANK, HIDDEN)
        for part, size in (("q", HIDDEN), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
            add(f"{start}.self_attn.{part}_proj.weight", size, HIDDEN, scale=0.3)
            if has_bias:
                add(f"{start}.self_attn.{part}_proj.bias", size)
        add(f"{start}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{start}.self_attn.gate.weight", HIDDEN, HIDDEN, scale=0.15)
        for part in ("gate", "up"):
            add(f"{start}.mlp.{part}_proj.weight", INNER, HIDDEN, scale=0.15)
        add(f"{start}.mlp.down_proj.weight", HIDDEN, INNER, scale=0.15)
    return result


def checkpoint(seed: int = 0, vocab_size: int = VOCAB) -> Checkpoint:
    """A model as a loader would return it."""
    readers = {name: (lambda tensor=x: tensor) for name, x in tensors(seed, vocab_size).items()}
    usual = {name: np.asarray(x()) for name, x in rwkv6.to_hf_layout(readers).items()}
    return Checkpoint("tiny", Path("tiny"), {**CONFIG, "vocab_size": vocab_size}, usual)


def expected_logits(
    stored: dict[str, np.ndarray], tokens: list[int], twin: str | None = None
) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]`, float64; `twin` names a mistake in the equations."""
    weights = {name: tensor.astype(np.float64) for name, tensor in stored.items()}
    layers, rows = [_Layer(weights, layer, twin) for layer in range(LAYERS)], []
    for token in tokens:
        x = weights["model.embed_tokens.weight"][token]
        for layer in layers:
            x = layer.step(x)
        rows.append(weights["lm_head.weight"] @ _norm(x, weights["model.norm.weight"]))
    return np.stack(rows)


class _Layer:
    """One layer, with what it keeps from one token to the next."""

    def __init__(self, weights: dict[str, np.ndarray], layer: int, twin: str | None) -> None:
        self._start, self._all, self._twin = f"model.layers.{layer}", weights, twin
        self._before = np.zeros(HIDDEN)
        self._state = np.zeros((HIDDEN // HEAD, HEAD, HEAD))  # [keys, values]

    def step(self, x: np.ndarray) -> np.ndarray:
        y = _norm(x, self._w("input_layernorm.weight"))
        mixed, self._before = self._time_mix(y), y
        x = x + mixed
        y = _norm(x, self._w("post_attention_layernorm.weight"))
        gate = self._w("mlp.gate_proj.weight") @ y
        inner = gate * _sigmoid(gate) * (self._w("mlp.up_proj.weight") @ y)
        return x + self._w("mlp.down_proj.weight") @ inner

    def _time_mix(self, x: np.ndarray) -> np.ndarray:
        change = self._before - x
        first = x + change * self._w("self_attn.time_maa_x").ravel()
        shares = np.tanh(first @ self._w("self_attn.time_maa_w1")).reshape(5, RANK)
        ups, mixed = self._w("self_attn.time_maa_w2"), {}
        order = "wkvrg" if self._twin == "the order of RWKV-6" else "rkvwg"
        for index, part in enumerate(order):
            share = self._w(f"self_attn.time_maa_{part}").ravel() + shares[index] @ ups[index]
            mixed[part] = x + change * share
        q, k, v = (
            self._linear(mixed[mix], f"{name}_proj")
            for name, mix in (("q", "r"), ("k", "k"), ("v", "v"))
        )
        rates = np.tanh(mixed["w"] @ self._w("self_attn.time_decay_w1"))
        rates = self._w("self_attn.time_decay").ravel() + rates @ self._w("self_attn.time_decay_w2")
        limit = np.inf if self._twin == "no limit of the decay" else 5.0
        decay = np.exp(-np.minimum(np.exp(rates), limit)).reshape(-1, HEAD)
        out, repeat = np.empty(HIDDEN), HIDDEN // HEAD // GROUPS
        for head in range(HIDDEN // HEAD):
            group = head % GROUPS if self._twin == "tiled heads" else head // repeat
            own = slice(group * HEAD, (group + 1) * HEAD)
            key = k[own] * (1.0 if self._twin == "whole keys" else 1 - decay[head])
            before = self._state[head].copy()
            self._state[head] = decay[head][:, None] * before + np.outer(key, v[own])
            seen = before if self._twin == "the state before the row" else self._state[head]
            query = q[head * HEAD : (head + 1) * HEAD] * HEAD**-0.5
            out[head * HEAD : (head + 1) * HEAD] = query @ seen
        gate = self._w("self_attn.gate.weight") @ mixed["g"]
        factor = gate * _sigmoid(gate) if self._twin == "SiLU" else _sigmoid(gate)
        return self._w("self_attn.o_proj.weight") @ (out * factor)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self._w(f"self_attn.{name}.weight") @ x
        bias = self._all.get(f"{self._start}.self_attn.{name}.bias")
        return y if bias is None else y + bias

    def _w(self, name: str) -> np.ndarray:
        return self._all[f"{self._start}.{name}"]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean() + 1e-6) * weight
    return scaled


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))

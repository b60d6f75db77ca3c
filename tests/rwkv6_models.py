"""Small random RWKV-6 models with published names, and their logits by the paper's equations (Peng
et al., arXiv:2404.05892), token by token in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import rwkv6

HIDDEN, HEAD, INNER, LAYERS, VOCAB, RANK, DECAY_RANK = 64, 16, 96, 3, 260, 5, 7
CONFIG: dict[str, Any] = {
    "architectures": ["Rwkv6ForCausalLM"],
    "model_type": "rwkv6",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "attention_hidden_size": HIDDEN,
    "num_attention_heads": 64,
    "head_size": HEAD,
    "head_size_divisor": 8,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "layer_norm_epsilon": 1e-5,
    "rescale_every": 6,
    "tie_word_embeddings": False,
}


def rwkv6_tensors(seed: int = 0, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Random float32 tensors by published name. No vector has a value that would hide an error."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float = 0.25, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape) * scale + mean
        tensors[name] = values.astype(np.float32)

    def norm(name: str) -> None:
        add(f"{name}.weight", HIDDEN, scale=0.2, mean=1.0)
        add(f"{name}.bias", HIDDEN, scale=0.2)

    add("rwkv.embeddings.weight", vocab, HIDDEN, scale=1.0)
    add("head.weight", vocab, HIDDEN)
    norm("rwkv.ln_out")
    norm("rwkv.blocks.0.pre_ln")
    for layer in range(LAYERS):
        start = f"rwkv.blocks.{layer}"
        for name in ("ln1", "ln2", "attention.ln_x"):
            norm(f"{start}.{name}")
        for part in "xwkvrg":
            share = generator.random((1, 1, HIDDEN), np.float32)
            tensors[f"{start}.attention.time_maa_{part}"] = share
        for part in "kr":
            share = generator.random((1, 1, HIDDEN), np.float32)
            tensors[f"{start}.feed_forward.time_maa_{part}"] = share
        add(f"{start}.attention.time_maa_w1", HIDDEN, 5 * RANK, scale=0.1)
        add(f"{start}.attention.time_maa_w2", 5, RANK, HIDDEN, scale=0.3)
        add(f"{start}.attention.time_decay", 1, 1, HIDDEN, scale=1.0, mean=-1.0)
        add(f"{start}.attention.time_decay_w1", HIDDEN, DECAY_RANK)
        add(f"{start}.attention.time_decay_w2", DECAY_RANK, HIDDEN)
        add(f"{start}.attention.time_faaaa", HIDDEN // HEAD, HEAD, scale=0.5)
        for part in ("receptance", "key", "value", "gate", "output"):
            add(f"{start}.attention.{part}.weight", HIDDEN, HIDDEN, scale=0.15)
        add(f"{start}.feed_forward.key.weight", INNER, HIDDEN, scale=0.15)
        add(f"{start}.feed_forward.receptance.weight", HIDDEN, HIDDEN)
        add(f"{start}.feed_forward.value.weight", HIDDEN, INNER, scale=0.15)
    return tensors


def rwkv6_checkpoint(seed: int = 0, vocab_size: int = VOCAB) -> Checkpoint:
    """A model as a loader would return it."""
    tensors = rwkv6_tensors(seed, vocab_size)
    readers = {name: (lambda tensor=tensor: tensor) for name, tensor in tensors.items()}
    usual = {name: np.asarray(x()) for name, x in rwkv6.to_hf_layout(readers).items()}
    return Checkpoint("tiny", Path("tiny"), {**CONFIG, "vocab_size": vocab_size}, usual)


def paper_logits(
    tensors: dict[str, np.ndarray], tokens: list[int], twin: str | None = None
) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]`, float64; `twin` names a mistake in the equations."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    layers, rows = [_Layer(weights, layer, twin) for layer in range(LAYERS)], []
    for token in tokens:
        x = _norm(weights["rwkv.embeddings.weight"][token], weights, "rwkv.blocks.0.pre_ln")
        for layer in layers:
            x = layer.step(x)
        rows.append(weights["head.weight"] @ _norm(x, weights, "rwkv.ln_out"))
    return np.stack(rows)


class _Layer:
    """One layer, with what it keeps from one token to the next."""

    def __init__(self, weights: dict[str, np.ndarray], layer: int, twin: str | None) -> None:
        self._start, self._all, self._twin = f"rwkv.blocks.{layer}", weights, twin
        self._before, self._before_mlp = np.zeros(HIDDEN), np.zeros(HIDDEN)
        self._state = np.zeros((HIDDEN // HEAD, HEAD, HEAD))

    def step(self, x: np.ndarray) -> np.ndarray:
        y = _norm(x, self._all, f"{self._start}.ln1")
        mixed, self._before = self._time_mix(y), y
        x = x + mixed
        y = _norm(x, self._all, f"{self._start}.ln2")
        k, r = (
            y + (self._before_mlp - y) * self._w(f"feed_forward.time_maa_{part}").ravel()
            for part in "kr"
        )
        self._before_mlp = y
        inner = np.maximum(self._w("feed_forward.key.weight") @ k, 0.0) ** 2
        gate = _sigmoid(self._w("feed_forward.receptance.weight") @ r)
        gate = np.ones(HIDDEN) if self._twin == "no receptance" else gate
        return x + gate * (self._w("feed_forward.value.weight") @ inner)

    def _time_mix(self, x: np.ndarray) -> np.ndarray:
        change = self._before - x
        first = x + change * self._w("attention.time_maa_x").ravel()
        shares = np.tanh(first @ self._w("attention.time_maa_w1")).reshape(5, RANK)
        if self._twin == "constant shares":
            shares = 0 * shares
        ups, mixed = self._w("attention.time_maa_w2"), {}
        for index, part in enumerate("wkvrg"):
            share = self._w(f"attention.time_maa_{part}").ravel() + shares[index] @ ups[index]
            mixed[part] = x + change * share
        r, k, v, g = (
            self._w(f"attention.{name}.weight") @ mixed[name[0]]
            for name in ("receptance", "key", "value", "gate")
        )
        rates = np.tanh(mixed["w"] @ self._w("attention.time_decay_w1"))
        rates = self._w("attention.time_decay").ravel() + rates @ self._w("attention.time_decay_w2")
        decay, bonus = np.exp(-np.exp(rates)), self._w("attention.time_faaaa")
        out = np.empty(HIDDEN)
        for head in range(HIDDEN // HEAD):
            own = slice(head * HEAD, (head + 1) * HEAD)
            added = np.outer(v[own], k[own])
            seen = self._state[head] + added * bonus[head]
            self._state[head] = self._state[head] * decay[own] + added
            if self._twin == "the state after the row":
                seen = self._state[head]
            y = seen @ r[own]
            out[own] = (y - y.mean()) / np.sqrt(y.var() + 64e-5)
        out = out * self._w("attention.ln_x.weight") + self._w("attention.ln_x.bias")
        return self._w("attention.output.weight") @ (out * g * _sigmoid(g))

    def _w(self, name: str) -> np.ndarray:
        return self._all[f"{self._start}.{name}"]


def _norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    y = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return y * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))

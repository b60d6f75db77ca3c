"""Forward passes of plain decoders in numpy, in float64, from tensors with usual names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.scripted import BYTE_VOCABULARY

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 48, 4, 2, 12, 80


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    """With the tangent."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@dataclass
class Decoder:
    """What a decoder computes.

    Attributes:
        tensors: By the names of Llama; experts are `mlp.experts.{i}.gate_proj`, their router is
            `mlp.gate`, and the gate of heads `self_attn.gate_proj`.
        bases: The base of the rotary frequencies of each layer; None: no rotary embedding.
        windows: The window of each layer; None: full attention.
        rotary: The numbers of a head that rotate, by layer.
        norms_last: Whether the norms of queries and keys are behind the rotary embedding.
        slopes: The linear biases of the heads.
        activation: Of the gate, or of an MLP without one: "silu", "gelu", "relu" or "relu2".
        limit: Of the products of gate (from above) and up (from both sides) in experts.
        experts: How many run for a token.
        router: Which function the chosen scores have: "softmax" or "sigmoid".
        routes_inputs: Whether the router reads the inputs of the layer.
        reads_states: Whether the experts beside an MLP read what that reads, before its norm.
        group: How many experts share one of `mlp.chunk_experts`, and its factor.
        softcaps: Of the scores of attention, of the router's outputs and of logits; infinity: none.
        scale: Of scores; None: the usual one.
        embedding_scale: Of embeddings.
        logit_scale: Of logits.
        has_layer_norms: Whether norms are layer norms.
        eps: Of norms.
    """

    tensors: Mapping[str, np.ndarray]
    bases: list[float | None]
    windows: list[int | None] = field(default_factory=lambda: [None] * 8)
    rotary: list[int] = field(default_factory=lambda: [HEAD] * 8)
    norms_last: bool = False
    slopes: np.ndarray | None = None
    activation: str = "silu"
    limit: float = np.inf
    experts: int = 0
    router: str = "softmax"
    routes_inputs: bool = False
    reads_states: bool = False
    group: tuple[int, float] = (1, 0.0)
    softcaps: tuple[float, float, float] = (np.inf, np.inf, np.inf)
    scale: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    has_layer_norms: bool = False
    eps: float = 1e-6

    def forward(self, tokens: list[int]) -> np.ndarray:
        """Logits `[len(tokens), vocab_size]`."""
        x = self._of("model.embed_tokens")[tokens] * self.embedding_scale
        for layer in range(len(self.bases)):
            name = f"model.layers.{layer}"
            start, y = x, self._norm(x, f"{name}.input_layernorm")
            is_recurrent = f"{name}.mamba.in_proj.weight" in self.tensors
            if is_recurrent:
                y = self._mamba(y, f"{name}.mamba")
            else:
                y = self._attention(y, layer, f"{name}.self_attn")
            has_more = f"{name}.pre_feedforward_layernorm.weight" in self.tensors
            x = x + (self._norm(y, f"{name}.post_attention_layernorm") if has_more else y)
            second = "pre_feedforward" if has_more else "post_attention"
            y = self._norm(x, f"{name}.{second}_layernorm")
            if f"{name}.residual_layernorm.weight" in self.tensors:  # beside the experts
                read = x if self.reads_states else start
                read = self._norm(read, f"{name}.post_attention_layernorm")
                y = self._norm(x, f"{name}.residual_layernorm")
                y = self._mlp(y, f"{name}.mlp.residual_mlp", np.inf)
                y = y + self._experts(read, read, f"{name}.mlp")
            elif self.experts:
                y = self._experts(y, start if self.routes_inputs else y, f"{name}.mlp")
            else:
                y = self._mlp(y, f"{name}.mlp", np.inf)
            x = x + (self._norm(y, f"{name}.post_feedforward_layernorm") if has_more else y)
        y = self._norm(x, "model.norm")
        has_head = "lm_head.weight" in self.tensors
        y = self.logit_scale * y @ self._of("lm_head" if has_head else "model.embed_tokens").T
        return _capped(y, self.softcaps[2])

    def _of(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[f"{name}.weight"], np.float64)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        bias = self.tensors.get(f"{name}.bias")
        y = x @ self._of(name).T
        return y if bias is None else y + bias

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.has_layer_norms:
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self._of(name)
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _mamba(self, x: np.ndarray, name: str) -> np.ndarray:
        """PLaMo 2's: head by head a gate and inputs; a step, a decay and a skip for each head."""
        count, rates = len(x), -np.exp(self.tensors[f"{name}.A_log"].astype(np.float64))
        heads, kernel = len(rates), self._of(f"{name}.conv1d")[:, 0]
        gate, inputs = np.split(self._linear(x, f"{name}.in_proj").reshape(count, heads, -1), 2, -1)
        padded = np.pad(inputs.reshape(count, -1), ((kernel.shape[1] - 1, 0), (0, 0)))
        mixed = sum(padded[i : i + count] * kernel[:, i] for i in range(kernel.shape[1]))
        size = len(self.tensors[f"{name}.b_layernorm.weight"])
        y = _silu(mixed)
        parts = np.split(self._linear(y, f"{name}.x_proj"), (size, 2 * size), -1)
        keys, queries, steps = (
            self._norm(part, f"{name}.{kind}_layernorm")
            for part, kind in zip(parts, ("b", "c", "dt"), strict=True)
        )
        steps = np.log1p(np.exp(self._linear(steps, f"{name}.dt_proj")))
        y, found = y.reshape(count, heads, -1), []
        state = np.zeros((heads, y.shape[2], size))
        for row in range(count):
            decayed = np.exp(rates * steps[row])[:, None, None] * state
            state = decayed + (steps[row][:, None] * y[row])[..., None] * keys[row]
            found.append(state @ queries[row] + self.tensors[f"{name}.D"][:, None] * y[row])
        output = np.stack(found) * _silu(gate)
        return self._linear(output.reshape(count, -1), f"{name}.out_proj")

    def _attention(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        if f"{name}.kv_b_proj.weight" in self.tensors:
            return self._latent_attention(x, layer, name)
        count = len(x)
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(count, -1, HEAD) for part in "qkv"
        )
        q, k = (self._positioned(x, layer, f"{name}.{part}") for x, part in ((q, "q"), (k, "k")))
        mixed = self._mixed(q, k, v, layer)
        if f"{name}.gate_proj.weight" in self.tensors:
            mixed = mixed / (1 + np.exp(-self._linear(x, f"{name}.gate_proj")))[..., None]
        return self._linear(mixed.reshape(count, -1), f"{name}.o_proj")

    def _latent_attention(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        """Keys of a latent, and of numbers with positions that heads share."""
        count, rotary, base = len(x), self.rotary[layer], self.bases[layer]
        assert base is not None
        rank, plain = len(self.tensors[f"{name}.kv_a_layernorm.weight"]), HEAD - rotary
        latent, key = np.split(self._linear(x, f"{name}.kv_a_proj_with_mqa"), [rank], -1)
        latent = self._norm(latent, f"{name}.kv_a_layernorm")
        parts = self._linear(latent, f"{name}.kv_b_proj").reshape(count, HEADS, -1)
        keys, values = np.split(parts, [plain], -1)
        key = np.repeat(_rotated(key[:, None], base, rotary), HEADS, axis=1)
        q = self._linear(x, f"{name}.q_proj").reshape(count, HEADS, HEAD)
        first, last = np.split(q, [plain], -1)
        q = np.concatenate([first, _rotated(last, base, rotary)], -1)
        mixed = self._mixed(q, np.concatenate([keys, key], -1), values, layer)
        return self._linear(mixed.reshape(count, -1), f"{name}.o_proj")

    def _mixed(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int) -> np.ndarray:
        """The values that the queries attend to."""
        count, heads = q.shape[:2]
        k, v = (np.repeat(part, heads // part.shape[1], axis=1) for part in (k, v))
        distance = np.arange(count)[:, None] - np.arange(count)
        scores = np.einsum("qhd,khd->hqk", q, k) * (self.scale or HEAD**-0.5)
        scores = _capped(scores, self.softcaps[0])
        if self.slopes is not None:
            scores -= self.slopes[:, None, None] * distance
        scores[:, (distance < 0) | (distance >= (self.windows[layer] or count))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed: np.ndarray = np.einsum("hqk,khd->qhd", weights, v)
        return mixed

    def _positioned(self, x: np.ndarray, layer: int, name: str) -> np.ndarray:
        """Queries or keys with norms, if there are some, and positions."""
        base, has_norm = self.bases[layer], f"{name}_norm.weight" in self.tensors
        if has_norm and not self.norms_last:
            x = self._norm(x, f"{name}_norm")
        x = x if base is None else _rotated(x, base, self.rotary[layer])
        return self._norm(x, f"{name}_norm") if has_norm and self.norms_last else x

    def _mlp(self, x: np.ndarray, name: str, limit: float) -> np.ndarray:
        up = self._linear(x, f"{name}.up_proj")
        has_gate = f"{name}.gate_proj.weight" in self.tensors
        gate = self._linear(x, f"{name}.gate_proj") if has_gate else up
        up = up if has_gate else np.ones_like(up)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        activations: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "silu": _silu,
            "gelu": _gelu,
            "relu": lambda y: np.maximum(y, 0),
            "relu2": lambda y: np.maximum(y, 0) ** 2,
        }
        gate = activations[self.activation](gate)
        return self._linear(gate * up, f"{name}.down_proj")

    def _experts(self, x: np.ndarray, inputs: np.ndarray, name: str) -> np.ndarray:
        scores = _capped(inputs @ self._of(f"{name}.gate").T, self.softcaps[1])
        found = np.zeros_like(x)
        for row, own in enumerate(scores):
            chosen = np.argsort(-own)[: self.experts]
            weights = np.exp(own[chosen] - own.max())
            if self.router == "sigmoid":
                weights = 1 / (1 + np.exp(-own[chosen]))
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                output = self._mlp(x[row], f"{name}.experts.{expert}", self.limit)
                found[row] += weight * output
                if self.group[1]:
                    further = f"{name}.chunk_experts.{expert // self.group[0]}"
                    found[row] += weight * self.group[1] * self._mlp(x[row], further, np.inf)
        if f"{name}.up_proj.weight" in self.tensors:
            found = (found + self._mlp(x, name, np.inf)) / np.sqrt(2)
        return found


def _capped(x: np.ndarray, cap: float) -> np.ndarray:
    return x if cap == np.inf else cap * np.tanh(x / cap)


def _rotated(x: np.ndarray, base: float, size: int) -> np.ndarray:
    """Heads `[count, heads, HEAD]` of which the first half of `size` numbers is rotated against the
    second."""
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = np.split(x, [size // 2, size], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def random_tensors(
    seed: int, layers: int = 3, experts: int = 0, kv_heads: int = KV_HEADS, **parts: Any
) -> dict[str, np.ndarray]:
    """Tensors of a random decoder, with experts in every layer if there are some.

    Args:
        seed: Of the numbers.
        layers: How many.
        experts: Of each layer; 0: one MLP.
        kv_heads: Heads of keys.
        **parts: "head" and "biases" of matrices and norms, "head_norms", and "head_gates": whether
            there are some.
    """
    matrix = random_matrices(seed)

    def norm(size: int) -> np.ndarray:
        return 1 + 0.1 * matrix(1, size)[0]

    tensors = {
        "model.embed_tokens.weight": 2 * matrix(BYTE_VOCABULARY, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": norm(HIDDEN),
    }
    if parts.get("head"):
        tensors["lm_head.weight"] = 3 * matrix(BYTE_VOCABULARY, HIDDEN)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (kv_heads * HEAD, HIDDEN),
            "self_attn.v_proj": (kv_heads * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        }
        if parts.get("head_gates"):
            shapes["self_attn.gate_proj"] = (HEADS, HIDDEN)
        if experts:
            shapes["mlp.gate"] = (experts, HIDDEN)
        for mlp in [f"mlp.experts.{i}" for i in range(experts)] or ["mlp"]:
            shapes |= {f"{mlp}.{part}_proj": (INNER, HIDDEN) for part in ("gate", "up")}
            shapes[f"{mlp}.down_proj"] = HIDDEN, INNER
        own = {name: 2 * matrix(*shape) for name, shape in shapes.items()}
        own |= {name: norm(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        if parts.get("head_norms"):
            own |= {f"self_attn.{part}_norm": norm(HEAD) for part in "qk"}
        tensors |= {f"model.layers.{layer}.{name}.weight": x for name, x in own.items()}
    if parts.get("biases"):
        for name, tensor in list(tensors.items()):
            if name not in ("model.embed_tokens.weight", "lm_head.weight"):
                tensors[name.replace("weight", "bias")] = matrix(1, len(tensor))[0]
    return tensors

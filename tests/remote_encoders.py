"""Encoders that `transformers` has not, or in another layout than their repositories: random
tensors with the names of the repositories, and the states by their published code, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encoder_models import SIZES
from gguf_models import write_folder

Array = np.ndarray
Tensors = dict[str, Array]
HIDDEN, INNER, LAYERS, VOCAB = 48, 80, 4, 61


@dataclass(frozen=True)
class Remote:
    """One kind of repository.

    Attributes:
        config: Its config.json.
        shapes: The shapes of its tensors.
        states: The states after the last layer, float64 `[tokens, hidden_size]`.
    """

    config: dict[str, Any]
    shapes: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]
    states: Callable[[Tensors, dict[str, Any], list[int]], Array]

    def with_config(self, **changes: Any) -> Remote:
        """The same with other values in its config."""
        return Remote({**self.config, **changes}, self.shapes, self.states)

    def tensors(self, seed: int = 0) -> Tensors:
        """Random tensors, float32."""
        random = np.random.default_rng(seed)
        found: Tensors = {}
        for name, shape in self.shapes(self.config).items():
            scale = 0.25 if len(shape) > 1 else 0.2
            offset = float(len(shape) == 1 and name.endswith("weight"))
            found[name] = (random.standard_normal(shape) * scale + offset).astype(np.float32)
        return found

    def write(self, folder: Path, tensors: Tensors) -> Path:
        """The folder of the repository."""
        return write_folder(folder, tensors, **self.config)


def _linear(t: Tensors, name: str, x: Array) -> Array:
    y = x @ t[f"{name}.weight"].astype(np.float64).T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def _norm(t: Tensors, name: str, x: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return x * t[f"{name}.weight"] + t[f"{name}.bias"]


def _gelu(x: Array) -> Array:
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    normalised: Array = weights / weights.sum(-1, keepdims=True)
    return normalised


def _rotated(x: Array, frequencies: Array) -> Array:
    """Heads `[heads, tokens, size]` with a rotary embedding of pairs (i, i + half)."""
    angles = np.arange(x.shape[1])[:, None] * frequencies
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def _attention(
    q: Array, k: Array, v: Array, heads: int, frequencies: Array | None, bias: Array | float = 0.0
) -> Array:
    """Attention to all tokens, from and to `[tokens, hidden_size]`; `bias` is that of the scores,
    `[heads, tokens, tokens]`."""
    q, k, v = (x.reshape(len(x), heads, -1).swapaxes(0, 1) for x in (q, k, v))
    if frequencies is not None:
        q, k = _rotated(q, frequencies), _rotated(k, frequencies)
    weights = _softmax(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]) + bias)
    return (weights @ v).swapaxes(0, 1).reshape(q.shape[1], -1)


def _powers(theta: float, dim: int) -> Array:
    found: Array = theta ** -(np.arange(0, dim, 2) / dim)
    return found


def _embedded(t: Tensors, start: str, norm: str, tokens: list[int], eps: float) -> Array:
    x = t[f"{start}word_embeddings.weight"][tokens].astype(np.float64)
    if f"{start}token_type_embeddings.weight" in t:
        x = x + t[f"{start}token_type_embeddings.weight"][0]
    return _norm(t, norm, x, eps)


def _embedding_shapes(start: str, norm: str, types: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{start}word_embeddings.weight": (VOCAB, HIDDEN)}
    if types:
        shapes[f"{start}token_type_embeddings.weight"] = (types, HIDDEN)
    return {**shapes, f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}


def _biased(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norms(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{leaf}": (HIDDEN,) for name in names for leaf in ("weight", "bias")}


def _jina_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = _embedding_shapes("embeddings.", "embeddings.LayerNorm", config["type_vocab_size"])
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _biased(f"{name}attention.{part}", HIDDEN, HIDDEN)
        shapes |= _norms(f"{name}attention.output.LayerNorm", f"{name}mlp.layernorm")
        shapes[f"{name}mlp.gated_layers.weight"] = (2 * INNER, HIDDEN)
        shapes |= _biased(f"{name}mlp.wo", HIDDEN, INNER)
    return {**shapes, **_biased("pooler.dense", HIDDEN, HIDDEN)}


def _jina_slopes(heads: int) -> Array:
    """As in the paper of ALiBi: a geometric series, and every second one of a longer one."""
    power = 2 ** math.floor(math.log2(heads))
    base = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    longer = [2 ** (-8 / (2 * power) * (i + 1)) for i in range(2 * power)]
    return np.array([*base, *longer[0::2]][:heads])


def _jina_states(t: Tensors, config: dict[str, Any], tokens: list[int]) -> Array:
    """JinaBERT: linear biases with the distance to both sides, and GEGLU."""
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    places = np.arange(len(tokens))
    distance = np.abs(places[:, None] - places)
    bias = -_jina_slopes(heads)[:, None, None] * distance
    x = _embedded(t, "embeddings.", "embeddings.LayerNorm", tokens, eps)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = (
            _linear(t, f"{name}attention.self.{part}", x) for part in ("query", "key", "value")
        )
        y = _linear(t, f"{name}attention.output.dense", _attention(q, k, v, heads, None, bias))
        x = _norm(t, f"{name}attention.output.LayerNorm", x + y, eps)
        gated, other = np.split(_linear(t, f"{name}mlp.gated_layers", x), 2, -1)
        y = _linear(t, f"{name}mlp.wo", _gelu(gated) * other)
        x = _norm(t, f"{name}mlp.layernorm", x + y, eps)
    return x


def _jina_code_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = _jina_shapes(config)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        for old in ("gated_layers.weight", "wo.weight", "wo.bias", "layernorm.weight"):
            del shapes[f"{name}mlp.{old}"]
        del shapes[f"{name}mlp.layernorm.bias"]
        shapes |= _norms(*(f"{name}attention.self.layer_norm_{part}" for part in "qk"))
        shapes |= _norms(f"{name}layer_norm_1", f"{name}layer_norm_2")
        shapes[f"{name}mlp.up_gated_layer.weight"] = (2 * INNER, HIDDEN)
        shapes |= _biased(f"{name}mlp.down_layer", HIDDEN, INNER)
    return shapes


def _jina_code_states(t: Tensors, config: dict[str, Any], tokens: list[int]) -> Array:
    """The same with norms of queries and keys, a second sum around the attention, and the gate
    behind the other half."""
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    places = np.arange(len(tokens))
    bias = -_jina_slopes(heads)[:, None, None] * np.abs(places[:, None] - places)
    x = _embedded(t, "embeddings.", "embeddings.LayerNorm", tokens, eps)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = (
            _linear(t, f"{name}attention.self.{part}", x) for part in ("query", "key", "value")
        )
        q, k = (
            _norm(t, f"{name}attention.self.layer_norm_{part}", y, eps)
            for part, y in (("q", q), ("k", k))
        )
        y = _linear(t, f"{name}attention.output.dense", _attention(q, k, v, heads, None, bias))
        y = _norm(t, f"{name}attention.output.LayerNorm", x + y, eps)
        x = _norm(t, f"{name}layer_norm_1", x + y, eps)
        other, gated = np.split(_linear(t, f"{name}mlp.up_gated_layer", x), 2, -1)
        y = _linear(t, f"{name}mlp.down_layer", _gelu(gated) * other)
        x = _norm(t, f"{name}layer_norm_2", x + y, eps)
    return x


def _gte_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    start = "new." if "NewModel" not in config["architectures"] else ""
    shapes = _embedding_shapes(
        f"{start}embeddings.", f"{start}embeddings.LayerNorm", config["type_vocab_size"]
    )
    for layer in range(LAYERS):
        name = f"{start}encoder.layer.{layer}."
        shapes |= _biased(f"{name}attention.qkv_proj", 3 * HIDDEN, HIDDEN)
        shapes |= _biased(f"{name}attention.o_proj", HIDDEN, HIDDEN)
        shapes[f"{name}mlp.up_gate_proj.weight"] = (2 * INNER, HIDDEN)
        shapes |= _biased(f"{name}mlp.down_proj", HIDDEN, INNER)
        shapes |= _norms(f"{name}attn_ln", f"{name}mlp_ln")
    return shapes


def _gte_states(t: Tensors, config: dict[str, Any], tokens: list[int]) -> Array:
    """GTE's `NewModel`: the rows of its matrix of keys, and up before gate in that of the MLP."""
    t = {name.removeprefix("new."): tensor for name, tensor in t.items()}
    heads, eps, theta = (
        config[key] for key in ("num_attention_heads", "layer_norm_eps", "rope_theta")
    )
    dim = HIDDEN // heads
    frequencies = _powers(theta, dim)
    if config["rope_scaling"] is not None:
        factor = config["rope_scaling"]["factor"]
        frequencies = _powers(theta * factor, dim) / factor ** (2 / dim)
    x = _embedded(t, "embeddings.", "embeddings.LayerNorm", tokens, eps)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = np.split(_linear(t, f"{name}attention.qkv_proj", x), 3, -1)
        y = _linear(t, f"{name}attention.o_proj", _attention(q, k, v, heads, frequencies))
        x = _norm(t, f"{name}attn_ln", x + y, eps)
        up, gate = np.split(_linear(t, f"{name}mlp.up_gate_proj", x), 2, -1)
        x = _norm(t, f"{name}mlp_ln", x + _linear(t, f"{name}mlp.down_proj", _gelu(gate) * up), eps)
    return x


def _nomic_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = _embedding_shapes("embeddings.", "emb_ln", config["type_vocab_size"])
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}."
        shapes |= _biased(f"{name}attn.Wqkv", 3 * HIDDEN, HIDDEN)
        shapes |= _biased(f"{name}attn.out_proj", HIDDEN, HIDDEN)
        shapes |= _norms(f"{name}norm1", f"{name}norm2")
        if layer % config["moe_every_n_layers"] == 1:
            count = config["num_experts"]
            shapes[f"{name}mlp.router.layer.weight"] = (count, HIDDEN)
            shapes[f"{name}mlp.experts.mlp.w1"] = (count * INNER, HIDDEN)
            shapes[f"{name}mlp.experts.mlp.w2"] = (count * INNER, HIDDEN)
            shapes[f"{name}mlp.experts.bias"] = (HIDDEN,)
        else:
            shapes |= _biased(f"{name}mlp.fc1", INNER, HIDDEN)
            shapes |= _biased(f"{name}mlp.fc2", HIDDEN, INNER)
    return shapes


def _nomic_states(t: Tensors, config: dict[str, Any], tokens: list[int]) -> Array:
    """Nomic BERT with experts in every second layer, whose weights are not normalised."""
    heads, eps = config["n_head"], config["layer_norm_epsilon"]
    frequencies = _powers(config["rotary_emb_base"], HIDDEN // heads)
    x = _embedded(t, "embeddings.", "emb_ln", tokens, eps)
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}."
        q, k, v = np.split(_linear(t, f"{name}attn.Wqkv", x), 3, -1)
        y = _linear(t, f"{name}attn.out_proj", _attention(q, k, v, heads, frequencies))
        x = _norm(t, f"{name}norm1", x + y, eps)
        if f"{name}mlp.fc1.weight" in t:
            y = _linear(t, f"{name}mlp.fc2", _gelu(_linear(t, f"{name}mlp.fc1", x)))
        else:
            y = _nomic_experts(t, f"{name}mlp.", config, x)
        x = _norm(t, f"{name}norm2", x + y, eps)
    return x


def _nomic_experts(t: Tensors, name: str, config: dict[str, Any], x: Array) -> Array:
    scores = _softmax(_linear(t, f"{name}router.layer", x))
    first, second = (
        t[f"{name}experts.mlp.{part}"].astype(np.float64).reshape(config["num_experts"], INNER, -1)
        for part in ("w1", "w2")
    )
    y = np.tile(t[f"{name}experts.bias"].astype(np.float64), (len(x), 1))
    for row, weights in enumerate(scores):
        for expert in np.argsort(-weights, kind="stable")[: config["moe_top_k"]]:
            hidden = _gelu(x[row] @ first[expert].T)
            y[row] += weights[expert] * (hidden @ second[expert])
    return y


_USUAL = {**SIZES, "num_hidden_layers": LAYERS}
_NOMIC = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_inner": INNER,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "activation_function": "gelu",
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "prenorm": False,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "num_experts": 5,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "expert_choice_router": False,
    "num_shared_experts": 0,
}
JINA = Remote(
    {
        **_USUAL,
        "model_type": "bert",
        "architectures": ["JinaBertForMaskedLM"],
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        "hidden_act": "gelu",
    },
    _jina_shapes,
    _jina_states,
)
JINA_CODE = Remote(JINA.config, _jina_code_shapes, _jina_code_states)
GTE = Remote(
    {
        **_USUAL,
        "model_type": "new",
        "architectures": ["NewModel"],
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "hidden_act": "gelu",
        "pack_qkv": True,
        "logn_attention_scale": False,
        "rope_theta": 500.0,
        "rope_scaling": {"factor": 2.0, "type": "ntk"},
        "type_vocab_size": 0,
    },
    _gte_shapes,
    _gte_states,
)
NOMIC = Remote(
    {**_NOMIC, "model_type": "nomic_bert", "architectures": ["NomicBertModel"]},
    _nomic_shapes,
    _nomic_states,
)
#: The kinds, by model type and setting.
REMOTE: dict[str, tuple[str, Remote]] = {
    "jina bert": ("jina_bert_v2", JINA),
    "jina bert with six heads": ("jina_bert_v2", JINA.with_config(num_attention_heads=6)),
    "jina bert of code": ("jina_bert_code", JINA_CODE),
    "gte of its repositories": ("gte", GTE),
    "gte multilingual": (
        "gte",
        GTE.with_config(
            architectures=["NewForTokenClassification", "NewForMaskedLM"],
            type_vocab_size=1,
            rope_scaling=None,
        ),
    ),
    "nomic bert with experts": ("nomic_bert_moe", NOMIC),
    "nomic bert with experts in one layer": (
        "nomic_bert_moe",
        NOMIC.with_config(moe_every_n_layers=3, moe_top_k=1),
    ),
}

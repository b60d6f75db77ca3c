"""A forward pass in float64 of LLaVA's image encoder with MustDrop's stage in it, head by head, and
a tiny encoder with random weights."""

from __future__ import annotations

from math import erf
from typing import Any

import numpy as np

SIDE, PATCH, WIDTH, INNER, HEADS, LAYERS = 12, 2, 16, 24, 2, 4


def tiny_encoder(hidden: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of an encoder for a language model of a hidden size."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.embeddings.class_embedding": (WIDTH,),
        "vision_tower.embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        "vision_tower.embeddings.position_embedding.weight": (SIDE * SIDE + 1, WIDTH),
        "vision_tower.pre_layrnorm.weight": (WIDTH,),
        "vision_tower.pre_layrnorm.bias": (WIDTH,),
    }
    linears = {
        "multi_modal_projector.linear_1": (hidden, WIDTH),
        "multi_modal_projector.linear_2": (hidden, hidden),
    }
    for layer in range(LAYERS):
        start = f"vision_tower.encoder.layers.{layer}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes[f"{start}.{norm}.weight"] = shapes[f"{start}.{norm}.bias"] = (WIDTH,)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linears[f"{start}.self_attn.{part}"] = (WIDTH, WIDTH)
        linears[f"{start}.mlp.fc1"], linears[f"{start}.mlp.fc2"] = (INNER, WIDTH), (WIDTH, INNER)
    for name, shape in linears.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
    tensors = {
        name: random.standard_normal(shape, np.float32)
        / np.float32(np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 4)
        for name, shape in shapes.items()
    }
    for name in tensors:
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + tensors[name]
    config = {
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": WIDTH, "intermediate_size": INNER,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "patch_size": PATCH,
            "image_size": SIDE * PATCH,
        },
    }  # fmt: skip
    return config, tensors


def image(seed: int) -> np.ndarray:
    """An image with flat areas of several colours and areas of noise."""
    random, size = np.random.default_rng(seed), SIDE * PATCH
    pixels = random.integers(0, 256, (size, size, 3), np.uint8)
    for top in range(0, size, 6):
        for left in range(0, size, 6):
            if random.random() < 0.5:
                noise = random.integers(0, 30, (6, 6, 3))
                pixels[top : top + 6, left : left + 6] = random.integers(0, 226, 3) + noise
    return pixels


class EncoderForward:
    """The encoder of `tiny_encoder`."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def run(self, pixels: np.ndarray, alike: float) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """The rows, their importance, and the mean cosine of every window, in raster order."""
        rows = [self._weight("embeddings.class_embedding")]
        kernel = self._weight("embeddings.patch_embedding.weight")
        mean, deviation = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        scaled = (pixels / 255 - mean) / deviation
        for y in range(0, SIDE * PATCH, PATCH):
            for x in range(0, SIDE * PATCH, PATCH):
                cut = scaled[y : y + PATCH, x : x + PATCH]
                rows.append(np.einsum("ocyx,yxc->o", kernel, cut))
        state = np.stack(rows) + self._weight("embeddings.position_embedding.weight")
        state = self._norm(state, "pre_layrnorm")
        state, _ = self._layer(state, 0)
        state, cosines = _merge(state, alike)
        for layer in range(1, LAYERS):
            features = state  # in the end, those before the last layer
            state, importance = self._layer(state, layer)
        inner = self._affine(features[1:], "multi_modal_projector.linear_1")
        inner = inner * (0.5 + 0.5 * np.vectorize(erf)(inner / np.sqrt(2)))
        return self._affine(inner, "multi_modal_projector.linear_2"), importance, cosines

    def _weight(self, name: str) -> np.ndarray:
        return self.tensors[f"vision_tower.{name}"]

    def _affine(self, x: np.ndarray, name: str) -> np.ndarray:
        result: np.ndarray = x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]
        return result

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        spread = np.sqrt(x.var(1, keepdims=True) + 1e-5)
        normed = (x - x.mean(1, keepdims=True)) / spread
        result: np.ndarray = normed * self._weight(f"{name}.weight") + self._weight(f"{name}.bias")
        return result

    def _layer(self, state: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The states behind a layer, and what the class token gives each patch, over the heads."""
        start, size = f"vision_tower.encoder.layers.{layer}", WIDTH // HEADS
        y = self._norm(state, f"encoder.layers.{layer}.layer_norm1")
        q, k, v = (self._affine(y, f"{start}.self_attn.{one}_proj") for one in "qkv")
        heads, shares = [], []
        for first in range(0, WIDTH, size):
            part = slice(first, first + size)
            weights = np.exp(q[:, part] @ k[:, part].T / np.sqrt(size))
            weights /= weights.sum(1, keepdims=True)
            heads.append(weights @ v[:, part])
            shares.append(weights[0, 1:])
        state = state + self._affine(np.hstack(heads), f"{start}.self_attn.out_proj")
        y = self._norm(state, f"encoder.layers.{layer}.layer_norm2")
        inner = self._affine(y, f"{start}.mlp.fc1")
        inner = inner / (1 + np.exp(-1.702 * inner))
        return state + self._affine(inner, f"{start}.mlp.fc2"), np.mean(shares, 0)


def _merge(state: np.ndarray, alike: float) -> tuple[np.ndarray, list[float]]:
    """The class token, the means of similar windows, the most similar first, and the others."""
    cosines, merged, taken = [], [], set[int]()
    for top in range(0, SIDE, 3):
        for left in range(0, SIDE, 3):
            window = [1 + SIDE * (top + i // 3) + left + i % 3 for i in range(9)]
            pairs = [
                state[a] @ state[b] / np.sqrt(state[a] @ state[a] * (state[b] @ state[b]))
                for a in window
                for b in window
                if a != b
            ]
            cosines.append(float(np.mean(pairs)))
            if cosines[-1] >= alike:
                merged.append((-cosines[-1], np.mean([state[one] for one in window], 0)))
                taken |= set(window)
    merged.sort(key=lambda one: one[0])
    others = [state[one] for one in range(1, len(state)) if one not in taken]
    return np.stack([state[0], *(row for _, row in merged), *others]), cosines

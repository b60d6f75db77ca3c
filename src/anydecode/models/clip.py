"""The image encoder of LLaVA 1.5 (Liu et al., arXiv:2310.03744): CLIP's vision transformer (Radford
et al., arXiv:2103.00020) and a projector to the language model's embeddings.

With `merge`, it also does what MustDrop (Liu et al., arXiv:2411.10803) does in the encoder: similar
neighbours are merged behind the first layer, and the last layer's attention says how important each
row is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.arithmetic import softmax
from anydecode.models.classification import gelu, sigmoid
from anydecode.models.files import read_json, untrusted
from anydecode.models.similar_windows import WINDOW, similar_windows

#: Of the colours of the images that CLIP was trained on, from 0 to 1.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
_TOWER = "vision_tower."
_PROJECTOR = "multi_modal_projector."
#: The supported values of keys of the config, which are also the defaults.
_SUPPORTED = {
    "hidden_act": "quick_gelu",
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
}
#: What stands before the names of those in some folders.
_STARTS = ("", "model.")


class ClipEncoder:
    """The image encoder of a folder of LLaVA 1.5 in Hugging Face's layout.

    Its sums are those of numpy, whose order may be another on another machine.

    Args:
        config: The keys of the folder's config.json.
        tensors: Its tensors by name.

    Attributes:
        hidden_size: The hidden size of the language model, that of the rows.
        patch: The side of a patch, in pixels.
        image_size: The side of an image, in pixels.
        fingerprint: A digest of the weights.

    Raises:
        CheckpointError: The folder has no such encoder.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        vision = config.get("vision_config")
        if not isinstance(vision, dict) or vision.get("model_type") != "clip_vision_model":
            raise CheckpointError("vision_config is no clip_vision_model")
        for name, supported in _SUPPORTED.items():
            part = vision if name == "hidden_act" else config
            if part.get(name, supported) != supported:
                raise CheckpointError(f"{name} is {part[name]!r}; supported is {supported!r}")
        self.num_layers = int(vision["num_hidden_layers"])
        self.patch, self.image_size = int(vision["patch_size"]), int(vision["image_size"])
        self._heads = int(vision["num_attention_heads"])
        self._eps = float(vision.get("layer_norm_eps", 1e-5))
        layer = config.get("vision_feature_layer", -2)
        self._num_run = layer if layer >= 0 else self.num_layers + 1 + layer
        if not 0 < self._num_run <= self.num_layers:
            raise CheckpointError(
                f"vision_feature_layer is {layer}; the encoder has {self.num_layers} layers"
            )
        self._weights = dict(_read(tensors))
        self._check(int(vision["hidden_size"]), int(vision["intermediate_size"]))
        self.hidden_size = len(self._weights[f"{_PROJECTOR}linear_2.bias"])
        digest = hashlib.sha256(f"{self._heads} {self._eps} {self._num_run}".encode())
        for name in sorted(self._weights):
            digest.update(name.encode() + self._weights[name].tobytes())
        self.fingerprint = digest.hexdigest()

    def _check(self, width: int, inner: int) -> None:
        """Raise CheckpointError unless every tensor is there and has its shape."""
        if width % self._heads or self.side < 1:
            raise CheckpointError(
                f"hidden_size is {width}, of {self._heads} heads, and image_size"
                f" {self.image_size}, in patches of {self.patch}: these do not fit together"
            )
        expected: dict[str, tuple[int, ...]] = {
            f"{_TOWER}embeddings.class_embedding": (width,),
            f"{_TOWER}embeddings.patch_embedding.weight": (width, 3, self.patch, self.patch),
            f"{_TOWER}embeddings.position_embedding.weight": (self.side**2 + 1, width),
        }
        linears: dict[str, tuple[int, ...]] = {}
        norms = [f"{_TOWER}pre_layrnorm"]
        for layer in range(self.num_layers):
            start = f"{_TOWER}encoder.layers.{layer}."
            norms += [f"{start}layer_norm{number}" for number in (1, 2)]
            for one in ("q", "k", "v", "out"):
                linears[f"{start}self_attn.{one}_proj"] = width, width
            linears |= {f"{start}mlp.fc1": (inner, width), f"{start}mlp.fc2": (width, inner)}
        last = self._weights.get(f"{_PROJECTOR}linear_2.bias", np.empty(0))
        linears[f"{_PROJECTOR}linear_1"] = last.size, width
        linears[f"{_PROJECTOR}linear_2"] = last.size, last.size
        for name in norms:
            expected |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
        for name, shape in linears.items():
            expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        for name, shape in expected.items():
            found = self._weights.get(name)
            if found is None or found.shape != shape:
                what = "is missing" if found is None else f"is {list(found.shape)}"
                raise CheckpointError(f"the tensor {name} {what}; it must be {list(shape)}")

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> ClipEncoder:
        """The encoder of a folder.

        Raises:
            CheckpointError: The folder has no such encoder.
        """
        from anydecode.models.loading.safetensors import open_tensors

        path = Path(folder)
        with untrusted(path, "image encoder"):
            return ClipEncoder(read_json(path / "config.json"), open_tensors(path))

    @property
    def side(self) -> int:
        """The number of patches on each side of an image."""
        return self.image_size // self.patch

    def num_rows(self, pixels: np.ndarray) -> int:
        """The number of rows of an image.

        Raises:
            InvalidRequestError: `pixels` is no image of the encoder's size.
        """
        size = self.image_size
        if pixels.dtype != np.uint8 or pixels.shape != (size, size, 3):
            raise InvalidRequestError(
                f"an image is {pixels.dtype} {list(pixels.shape)}; it must be uint8"
                f" [{size}, {size}, 3]: resize and crop it"
            )
        return self.side * self.side

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """The rows of an image, float32 `[patches, hidden_size]`: its patches from left to right
        and from top to bottom.

        Args:
            pixels: uint8 `[image_size, image_size, 3]`.

        Raises:
            InvalidRequestError: As for `num_rows`.
        """
        state = self._embedded(pixels)
        for layer in range(self._num_run):
            state = self._layer(layer, state)
        return self._projected(state)

    def merge(self, pixels: np.ndarray, alike: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
        """The rows of an image whose similar neighbours are merged, and their importance.

        Behind the first layer, each 3 x 3 window whose mean pairwise cosine is at least `alike`
        becomes its mean. Those come first, the most similar one before the others; then the other
        patches, in their order. The importance of a row is the attention that it has from the class
        token in the last layer, averaged over the heads.

        Args:
            pixels: As for `encode`.
            alike: See above.

        Returns:
            Float32 `[rows, hidden_size]` and `[rows]`, for `PromptEmbeds` with `is_grid=False`.

        Raises:
            InvalidRequestError: As for `num_rows`.
            UnsupportedCombinationError: The windows do not fill an image.
        """
        if self.side % WINDOW:
            raise UnsupportedCombinationError(
                f"an image has {self.side} x {self.side} patches, which windows of {WINDOW} x"
                f" {WINDOW} do not fill: use encode"
            )
        state, features = self._embedded(pixels), None
        for layer in range(self.num_layers):
            if layer == self._num_run:
                features = state
            if layer == self.num_layers - 1:
                break
            state = self._layer(layer, state)
            if layer == 0:
                state = np.concatenate([state[:1], _merged(state[1:], self.side, alike)])
        attention = self._attention(self.num_layers - 1, state)[:, 0, 1:].mean(0)
        if features is None:
            features = self._layer(self.num_layers - 1, state)
        return self._projected(features), attention

    def _embedded(self, pixels: np.ndarray) -> np.ndarray:
        """The class token and the patches before the first layer, `[1 + patches, width]`."""
        count, side, patch = self.num_rows(pixels), self.side, self.patch
        cut = ((pixels / np.float32(255) - MEAN) / STD)[: side * patch, : side * patch]
        patches = cut.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        kernel = self._weights[f"{_TOWER}embeddings.patch_embedding.weight"]
        rows = patches.reshape(count, -1) @ kernel.reshape(len(kernel), -1).T
        start = self._weights[f"{_TOWER}embeddings.class_embedding"].reshape(1, -1)
        state = np.concatenate([start, rows])
        state = state + self._weights[f"{_TOWER}embeddings.position_embedding.weight"]
        return self._norm(f"{_TOWER}pre_layrnorm", state)  # the checkpoints' spelling

    def _layer(self, layer: int, state: np.ndarray) -> np.ndarray:
        start = f"{_TOWER}encoder.layers.{layer}."
        y = self._norm(f"{start}layer_norm1", state)
        values = self._split(f"{start}self_attn.v_proj", y)
        mixed = (self._attention(layer, state) @ values).swapaxes(0, 1).reshape(state.shape)
        state = state + self._linear(f"{start}self_attn.out_proj", mixed)
        inner = self._linear(f"{start}mlp.fc1", self._norm(f"{start}layer_norm2", state))
        return state + self._linear(f"{start}mlp.fc2", inner * sigmoid(np.float32(1.702) * inner))

    def _attention(self, layer: int, state: np.ndarray) -> np.ndarray:
        """The attention of a layer, `[heads, rows, rows]`."""
        start = f"{_TOWER}encoder.layers.{layer}."
        y = self._norm(f"{start}layer_norm1", state)
        queries, keys = (self._split(f"{start}self_attn.{one}_proj", y) for one in "qk")
        scale = np.float32(queries.shape[2] ** -0.5)
        return softmax(queries @ keys.swapaxes(1, 2) * scale)

    def _projected(self, state: np.ndarray) -> np.ndarray:
        inner = gelu(self._linear(f"{_PROJECTOR}linear_1", state[1:])).astype(np.float32)
        return self._linear(f"{_PROJECTOR}linear_2", inner)

    def _split(self, name: str, x: np.ndarray) -> np.ndarray:
        """The products of the heads, `[heads, rows, head_dim]`."""
        return self._linear(name, x).reshape(len(x), self._heads, -1).swapaxes(0, 1)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return result

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + self._eps)
        result: np.ndarray = scaled * self._weights[f"{name}.weight"]
        return result + self._weights[f"{name}.bias"]


def _merged(rows: np.ndarray, side: int, alike: float) -> np.ndarray:
    """Rows with similar windows merged: see `ClipEncoder.merge`."""
    windows = similar_windows(rows, side, alike)
    means = [rows[window].mean(0, keepdims=True) for window in windows]
    others = np.setdiff1d(np.arange(len(rows)), np.concatenate([[], *windows])).astype(int)
    return np.concatenate([*means, rows[others]])


def _read(tensors: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The encoder's tensors, float32, by the names that folders of `transformers` 5 have."""
    found = []
    for name in tensors:
        for start in _STARTS:
            own = name.removeprefix(start).replace("vision_tower.vision_model.", _TOWER, 1)
            if name.startswith(start) and own.startswith((_TOWER, _PROJECTOR)):
                found.append((own, np.asarray(tensors[name], np.float32)))
                break
    return found

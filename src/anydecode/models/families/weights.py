"""Reads tensors by their Hugging Face names, checks shapes and converts to the requested format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.formats import DTYPES as FLOATS
from anydecode.kernels.formats import dequantize, in_order, is_packed, plain_weight, quantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.linear import Linear, update_weights

#: dtype -> (format of the layers' matrices, format of the embedding and the head). Four-bit
#: embeddings and heads lose more accuracy.
DTYPES: dict[str | None, tuple[str | None, str | None]] = {
    None: (None, None),
    "float32": ("F32", "F32"),
    "bfloat16": ("BF16", "BF16"),
    "float16": ("F16", "F16"),
    "int8": ("Q8_0", "Q8_0"),
    "int4": ("Q4_0", "Q8_0"),
}

_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "backbone.",
    "encoder.",
    "transformer.",
    "",
)


class TensorReader:
    """Reads a checkpoint's tensors.

    Names are given without the family's prefix, which that of the `embedding` has:
    `layers.0.mlp.up_proj`. Missing and invalid tensors raise a CheckpointError that names the
    tensor. With `keeps_updates`, `linear` returns the updates of packed matrices beside these;
    otherwise all are merged. `stored_name` is that of the family.

    Raises:
        InvalidRequestError: `dtype` is unknown.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str | None,
        embedding: str = "embed_tokens",
        keeps_updates: bool = False,
        stored_name: Callable[[str], str] | None = None,
    ) -> None:
        if dtype not in DTYPES:
            known = ", ".join(name for name in DTYPES if name)
            raise InvalidRequestError(f"dtype {dtype!r} is unknown; choose from {known}")
        self._tensors = checkpoint.tensors
        self._updates = checkpoint.updates if keeps_updates else {}
        self._source, self._stored_name = checkpoint.name, stored_name
        self._layer_format, self._outer_format = DTYPES[dtype]
        self._shared: dict[str, Linear] = {}
        prefixes = (p for p in _PREFIXES if f"{p}{embedding}.weight" in checkpoint.tensors)
        self._prefix = next(prefixes, "model.")

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name (suffix included)."""
        return self._full_name(name) in self._tensors

    def has_module(self, name: str) -> bool:
        """Whether there is a tensor of this module or of a submodule."""
        start = f"{self._full_name(name)}."
        return any(tensor.startswith(start) for tensor in self._tensors)

    def first(self, names: Iterable[str]) -> str:
        """The first of `names` for which there is a `.weight`; the first name if there is none."""
        options = list(names)
        return next((name for name in options if self.has(f"{name}.weight")), options[0])

    def vector(self, name: str, size: int, offset: float = 0.0) -> np.ndarray:
        """A one-dimensional tensor in float32, plus `offset`."""
        return self.tensor(name, (size,), offset)

    def tensor(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> np.ndarray:
        """A tensor of floats in float32, plus `offset`."""
        tensor = self._read(name)
        if isinstance(tensor, Weight):
            raise CheckpointError(f"{self._source}: {self._full_name(name)} is packed as a matrix")
        self._check(name, tuple(tensor.shape), shape)
        if tensor.dtype not in FLOATS.values() and tensor.dtype != np.float64:
            raise CheckpointError(
                f"{self._source}: {self._full_name(name)} is {tensor.dtype}, no float"
            )
        # A copy, because a view would keep the mapped file open.
        vector = tensor.astype(np.float32)
        return vector + np.float32(offset) if offset else vector

    def numbers(self, name: str, shape: tuple[int, ...], stop: int) -> np.ndarray:
        """A tensor of integers from 0 to `stop` - 1 as int32."""
        tensor = self._read(name)
        if isinstance(tensor, Weight) or tensor.dtype.kind not in "iu":
            raise CheckpointError(f"{self._source}: {self._full_name(name)} has no integers")
        self._check(name, tuple(tensor.shape), shape)
        if not 0 <= int(tensor.min(initial=0)) <= int(tensor.max(initial=0)) < stop:
            raise CheckpointError(
                f"{self._source}: {self._full_name(name)} has numbers from {tensor.min()} to"
                f" {tensor.max()}, not from 0 to {stop - 1}"
            )
        return np.ascontiguousarray(tensor, np.int32)

    def integers(self, name: str, size: int) -> np.ndarray:
        """A one-dimensional tensor of integers above or at 0, int64."""
        tensor = self._read(name)
        if isinstance(tensor, Weight) or tensor.dtype.kind not in "iu":
            raise CheckpointError(f"{self._source}: {self._full_name(name)} has no integers")
        self._check(name, tuple(tensor.shape), (size,))
        if int(tensor.min(initial=0)) < 0:
            raise CheckpointError(f"{self._source}: {self._full_name(name)} has a negative number")
        return tensor.astype(np.int64)

    def table(self, name: str, width: int) -> Weight:
        """A matrix of any number of rows of `width` numbers, which may be stored in parts, as
        `shard_0` and so on."""
        if self.has(f"{name}.weight"):
            return self.matrix(name, (self.shape(f"{name}.weight")[0], width), is_outer=True)
        parts: list[Weight] = []
        while self.has(f"{name}.shard_{len(parts)}.weight"):
            part = f"{name}.shard_{len(parts)}"
            parts.append(self.matrix(part, (self.shape(f"{part}.weight")[0], width), is_outer=True))
        if not parts or len({(part.format, part.scale) for part in parts}) > 1:
            raise CheckpointError(
                f"{self._source}: {self._full_name(name)} is missing, or in several formats"
            )
        data = np.concatenate([part.data for part in parts])
        return replace(parts[0], out_features=len(data), data=data)

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: slice | np.ndarray | None = None,
        alias: str | None = None,
        is_outer: bool = False,
        keep_format: bool = False,
        keep_order: bool = False,
        part: str = "weight",
    ) -> Weight:
        """Read the matrix `name`.`part`.

        Args:
            name: The module's name.
            shape: The expected shape.
            rows: The rows to take from a fused matrix, or their order.
            alias: The name of the result; None means `name`.
            is_outer: Whether it is the embedding or the head.
            keep_format: Keep the stored format.
            keep_order: Keep the stored order of the inputs, for a product of this matrix alone or
                for experts.
            part: The matrix of a module with several.
        """
        tensor = self._read(f"{name}.{part}")
        if not isinstance(tensor, Weight):
            if tensor.dtype not in FLOATS.values() or tensor.ndim != 2:
                raise CheckpointError(
                    f"{self._source}: {self._full_name(name)}.{part} is {tensor.dtype} of shape"
                    f" {tuple(tensor.shape)}, not a matrix of floats"
                )
            tensor = plain_weight(tensor)
        self._check(f"{name}.{part}", (tensor.out_features, tensor.in_features), shape)
        return self.convert(
            tensor if keep_order else in_order(tensor),
            alias or name,
            rows=rows,
            is_outer=is_outer,
            keep_format=keep_format,
        )

    def convert(
        self,
        weight: Weight,
        name: str,
        *,
        rows: slice | np.ndarray | None = None,
        is_outer: bool = False,
        keep_format: bool = False,
    ) -> Weight:
        """A weight, or some of its rows, in the requested format and with its full name."""
        name = name if name == "lm_head" else f"model.{self._stored(name)}"
        data = weight.data if rows is None else weight.data[rows]
        stored = replace(weight, out_features=len(data), data=data, name=name)
        format = None if keep_format else (self._outer_format if is_outer else self._layer_format)
        if format is None or format == stored.format:
            return stored
        values = dequantize(stored)
        if format in FLOATS:
            return plain_weight(values.astype(FLOATS[format]), name)
        return quantize(values, format, name)

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        has_bias: bool,
        *,
        rows: slice | np.ndarray | None = None,
        alias: str | None = None,
    ) -> Linear:
        """A matrix and its bias, which is required if `has_bias` and otherwise read if present."""
        linear = self._updated(name, shape, rows, alias)
        if linear is None:
            linear = Linear(self.matrix(name, shape, rows=rows, alias=alias, keep_order=True))
        if has_bias or self.has(f"{name}.bias"):
            vector = self.vector(f"{name}.bias", shape[0])
            linear.bias = vector if rows is None else vector[rows]
        return linear

    def shared(
        self,
        name: str,
        shape: tuple[int, int],
        has_bias: bool,
        *,
        rows: slice | None = None,
        alias: str | None = None,
    ) -> Linear:
        """`linear` of a matrix that several layers share, which is read once."""
        key = alias or name
        if key not in self._shared:
            self._shared[key] = self.linear(name, shape, has_bias, rows=rows, alias=alias)
        return replace(self._shared[key])

    def _updated(
        self,
        name: str,
        shape: tuple[int, int],
        rows: slice | np.ndarray | None,
        alias: str | None,
    ) -> Linear | None:
        """A matrix that is packed, and its update; None if it has none, or is not packed."""
        update = self._updates.get(self._full_name(name))
        if update is None:
            return None
        stored = update.read()
        if not isinstance(stored, Weight):
            stored = plain_weight(stored)
        if not is_packed(self._layer_format or stored.format):
            return None
        for found in (
            (stored.out_features, stored.in_features),
            (update.up.shape[0], update.down.shape[1]),
        ):
            self._check(f"{name}.weight", found, shape)
        weight = self.convert(stored, alias or name, rows=rows)
        up = update.up if rows is None else update.up[rows]
        return Linear(weight, update=update_weights(update.down, up, weight.name))

    def stacked(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A float tensor `[experts, ...]`, checked to have `shape`."""
        tensor = self._read(name)
        if isinstance(tensor, Weight) or tensor.dtype not in FLOATS.values():
            raise CheckpointError(
                f"{self._source}: {self._full_name(name)} is not a stack of matrices of floats"
            )
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of a tensor."""
        tensor = self._read(name)
        if isinstance(tensor, Weight):
            return tensor.out_features, tensor.in_features
        return tuple(tensor.shape)

    def codes(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor of bytes, checked to have `shape`."""
        tensor = self._read(name)
        if isinstance(tensor, Weight) or tensor.dtype != np.uint8:
            raise CheckpointError(f"{self._source}: {self._full_name(name)} is no tensor of bytes")
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def _full_name(self, name: str) -> str:
        is_head = name.startswith("lm_head.") or name == "decoder.bias"
        return name if is_head else self._prefix + self._stored(name)

    def _stored(self, name: str) -> str:
        return name if self._stored_name is None else self._stored_name(name)

    def _read(self, name: str) -> np.ndarray | Weight:
        full = self._full_name(name)
        if full == "lm_head.weight" and full not in self._tensors:
            others = ("language_model.lm_head.weight", "diffusion_head.weight", "decoder.weight")
            full = next((name for name in others if name in self._tensors), full)
        if full not in self._tensors:
            raise CheckpointError(f"{self._source}: tensor {full} is missing")
        return self._tensors[full]

    def _check(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise CheckpointError(
                f"{self._source}: tensor {self._full_name(name)} has shape {shape}, not {expected}"
            )


def attention_name(reader: TensorReader, layer: str) -> str:
    """The name of a layer's first sublayer, which Ling has another word for."""
    other = f"{layer}.attention"
    return other if reader.has_module(other) else f"{layer}.self_attn"

"""Tensors under their Hugging Face names, checked for shape and brought into the wanted format."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.formats import dequantize, plain_weight, quantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Linear

#: dtype -> (format of the layers' matrices, format of the embedding and the head). Four bits cost
#: more where a token has one row to itself and where the logits are made.
DTYPES: dict[str | None, tuple[str | None, str | None]] = {
    None: (None, None),
    "float32": ("F32", "F32"),
    "bfloat16": ("BF16", "BF16"),
    "float16": ("F16", "F16"),
    "int8": ("Q8_0", "Q8_0"),
    "int4": ("Q4_0", "Q8_0"),
}

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


class TensorReader:
    """Reads a checkpoint's tensors onto `device`. Names are given without the family's prefix:
    `layers.0.mlp.up_proj`. Every failure is a CheckpointError that names the tensor."""

    def __init__(self, checkpoint: Checkpoint, dtype: str | None, device: torch.device) -> None:
        if dtype not in DTYPES:
            known = ", ".join(name for name in DTYPES if name)
            raise InvalidRequestError(f"dtype {dtype!r} is unknown; choose from {known}")
        self._tensors = checkpoint.tensors
        self._source = checkpoint.name
        self._device = device
        self._layer_format, self._outer_format = DTYPES[dtype]
        found = (p for p in _PREFIXES if f"{p}embed_tokens.weight" in checkpoint.tensors)
        self._prefix = next(found, "model.")

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name (suffix included)."""
        return self._full(name) in self._tensors

    def has_module(self, name: str) -> bool:
        """Whether there is a tensor of this module or of one within it."""
        start = f"{self._full(name)}."
        return any(tensor.startswith(start) for tensor in self._tensors)

    def first(self, names: Iterable[str]) -> str:
        """The first name that has a `.weight`; the first of all if none has."""
        options = list(names)
        return next((name for name in options if self.has(f"{name}.weight")), options[0])

    def vector(self, name: str, size: int, offset: float = 0.0) -> torch.Tensor:
        """A one-dimensional tensor in float32, plus `offset`."""
        tensor = self._read(name)
        if isinstance(tensor, Weight):
            raise CheckpointError(f"{self._source}: {self._full(name)} is packed as a matrix")
        self._check(name, tuple(tensor.shape), (size,))
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self._source}: {self._full(name)} is {tensor.dtype}, no float")
        # A copy: a view would keep a mapped file in memory for the sake of a few numbers.
        return tensor.to(self._device, torch.float32, copy=True) + offset

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: slice | None = None,
        alias: str | None = None,
        outer: bool = False,
        keep: bool = False,
    ) -> Weight:
        """`name`.weight as a `Weight`, of which `shape` is checked; `rows` cuts a part out of a
        fused matrix, and then `alias` is the part's own name. `outer`: embedding or head. `keep`:
        leave the numbers as they are stored."""
        tensor = self._read(f"{name}.weight")
        if not isinstance(tensor, Weight):
            if tensor.dtype not in _FLOATS.values() or tensor.dim() != 2:
                raise CheckpointError(
                    f"{self._source}: {self._full(name)}.weight is {tensor.dtype} of shape"
                    f" {tuple(tensor.shape)}, not a matrix of floats"
                )
            tensor = plain_weight(tensor)
        self._check(f"{name}.weight", (tensor.out_features, tensor.in_features), shape)
        return self.convert(tensor, alias or name, rows=rows, outer=outer, keep=keep)

    def convert(
        self,
        weight: Weight,
        name: str,
        *,
        rows: slice | None = None,
        outer: bool = False,
        keep: bool = False,
    ) -> Weight:
        """A weight, or some of its rows, in the wanted format and under its canonical name."""
        name = name if name == "lm_head" else f"model.{name}"
        data = weight.data if rows is None else weight.data[rows]
        own = Weight(weight.format, len(data), weight.in_features, data.to(self._device), name)
        wanted = None if keep else (self._outer_format if outer else self._layer_format)
        if wanted is None or wanted == own.format:
            return own
        values = dequantize(own)
        if wanted in _FLOATS:
            return plain_weight(values.to(_FLOATS[wanted]), name)
        return quantize(values, wanted, name)

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        bias: bool,
        *,
        rows: slice | None = None,
        alias: str | None = None,
    ) -> Linear:
        """A matrix and its bias: required if `bias`, otherwise taken where there is one."""
        weight = self.matrix(name, shape, rows=rows, alias=alias)
        vector = None
        if bias or self.has(f"{name}.bias"):
            vector = self.vector(f"{name}.bias", shape[0])
            vector = vector if rows is None else vector[rows]
        return Linear(weight, vector)

    def stacked(self, name: str, shape: tuple[int, int, int]) -> torch.Tensor:
        """A tensor `[experts, out, in]` of floats, of which `shape` is checked."""
        tensor = self._read(name)
        if isinstance(tensor, Weight) or tensor.dtype not in _FLOATS.values():
            raise CheckpointError(
                f"{self._source}: {self._full(name)} is not a stack of matrices of floats"
            )
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name

    def _read(self, name: str) -> torch.Tensor | Weight:
        full = self._full(name)
        if full == "lm_head.weight" and full not in self._tensors:
            nested = "language_model.lm_head.weight"
            full = nested if nested in self._tensors else full
        if full not in self._tensors:
            raise CheckpointError(f"{self._source}: tensor {full} is missing")
        return self._tensors[full]

    def _check(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise CheckpointError(
                f"{self._source}: tensor {self._full(name)} has shape {shape}, not {wanted}"
            )

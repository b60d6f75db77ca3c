"""The operations of a transformer in Triton, fused where possible.

Norms, products and rotations are lazy values, which the operation that needs them may fuse. A norm
is fused into the product after it, three products of one input into one launch, a gate and its
product into one kernel, a residual into the end of a product, and the rotation, the norm of heads
and the cache write into one kernel. The fusion depends on the network alone, not on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from anydecode.kernels.cuda import attention, pointwise
from anydecode.kernels.cuda.available import kernel_device
from anydecode.kernels.cuda.packing import Packed, pack
from anydecode.kernels.cuda.products import product
from anydecode.kernels.cuda.rows import DeviceRows, to_device
from anydecode.kernels.elementary import RotaryTable
from anydecode.kernels.interface import (
    Activation,
    Adapter,
    Attention,
    Biases,
    ExpertWeights,
    KeyValues,
    Rope,
    Routing,
    Rows,
    Weight,
    Xielu,
)
from anydecode.kernels.recurrent import Scan
from anydecode.kernels.reference import ReferenceBackend
from anydecode.kernels.torch_arrays import as_tensor

_MIN_POSITIONS = 1024
#: The activations that the kernels have; others run as operations of torch.
_FUSED = ("silu", "gelu", "gelu_tanh")


@dataclass(eq=False)
class LazyValue:
    """A value that is computed when it is needed; `result` is None until then."""

    result: torch.Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Norm(LazyValue):
    """The RMS norm of x."""

    x: Any
    weight: np.ndarray | None
    eps: float
    groups: int


@dataclass(eq=False, kw_only=True)
class Product(LazyValue):
    """x @ weight.T + bias."""

    x: Any
    weight: Weight
    bias: np.ndarray | None


@dataclass(eq=False, kw_only=True)
class Rotate(LazyValue):
    """x with the rotary embedding applied to its heads."""

    x: Any
    heads: int
    rope: Rope


class TritonBackend(ReferenceBackend):
    """Values are float32 tensors `[m, width]` on the kernels' device, or `LazyValue`s.

    `force` turns either into a tensor. Weights and vectors are moved to the device and packed at
    their first use. Experts are routed by the reference, which synchronises with the host, so
    passes of such models are not captured. `product_dtype` is the dtype of values that only
    products read: bfloat16 where all products round to it.

    Args:
        device: Of the values; None: the kernels' device.
        splits: Number of splits of attention keys.
    """

    name = "triton"

    def __init__(
        self, device: str | torch.device | None = None, splits: int = attention.SPLITS
    ) -> None:
        super().__init__(device or kernel_device())
        self.splits = splits
        self.product_dtype = torch.float32
        self.rows: DeviceRows | None = None
        self.num_bytes = 0
        self.has_routed = False  # whether experts were routed, on the host
        self._cache: KeyValues | None = None
        self._packed: dict[Weight, Packed] = {}
        self._groups: dict[tuple[Weight, ...], Packed] = {}

    # --- the rows of the values

    def bind(
        self,
        rows: Rows,
        index: np.ndarray,
        cache: KeyValues,
        adapters: Sequence[Adapter] = (),
        scan: Scan | None = None,
    ) -> None:
        super().bind(rows, index, cache, adapters, scan)
        self.grow_tables(int(rows.positions[index].max(initial=0)))
        self.bind_device(to_device(rows, index, self.device), cache)

    def bind_device(self, rows: DeviceRows, cache: KeyValues) -> None:
        """Set rows that are on the device already; none has an adapter."""
        self.rows, self._cache = rows, cache

    def unbind(self) -> None:
        super().unbind()
        self.rows = None

    def grow_tables(self, max_position: int) -> bool:
        """Extend all rotary tables to position `max_position`; return whether any was reallocated.

        Lengths are doubled, because captured passes must be captured again after a reallocation.
        """
        has_moved = False
        for table in self._rotary.values():
            if max_position >= len(table.tables[0]):
                position = torch.zeros(1, dtype=torch.int64, device=self.device)
                table.rows(position, triton.next_power_of_2(max_position + 1) - 1)
                has_moved = True
        return has_moved

    def force(self, value: Any) -> torch.Tensor:
        """The tensor of a value, computed if it is lazy."""
        if not isinstance(value, LazyValue):
            tensor: torch.Tensor = value
            return tensor
        if value.result is None:
            value.result = self._compute(value)
        return value.result

    def _compute(self, value: LazyValue) -> torch.Tensor:
        if isinstance(value, Norm):
            weight = None if value.weight is None else self._vector(value.weight)
            return pointwise.rms_norm(self.force(value.x), weight, value.eps, value.groups)
        if isinstance(value, Product):
            return self._product_of(value, self.packed(value.weight), value.bias)
        assert isinstance(value, Rotate)
        x, rows = self.force(value.x), self._device_rows()
        return attention.rotate(x, value.heads, rows, self.rotary_table(value.rope))

    # --- weights

    def packed(self, weight: Weight) -> Packed:
        """A weight in the layout of the kernels."""
        if weight not in self._packed:
            self._packed[weight] = pack([weight], self.device)
            self.num_bytes += self._packed[weight].num_bytes
        return self._packed[weight]

    def group(self, weights: tuple[Weight, ...], gated: bool = False) -> Packed | None:
        """Weights with the same input as one matrix; None where their formats or widths differ, or
        an order of inputs is their own."""
        if weights not in self._groups:
            first = weights[0]
            if any((w.format, w.in_features) != (first.format, first.in_features) for w in weights):
                return None
            if any(w.order is not None for w in weights):
                return None
            whole = self._groups[weights] = pack(weights, self.device, gated)
            self.num_bytes += whole.num_bytes
            start = 0
            for weight in weights:
                self._packed[weight] = whole.rows(start, start + weight.out_features)
                start += weight.out_features
        return self._groups[weights]

    # --- operations

    def rms_norm(  # type: ignore[override]
        self, x: Any, weight: np.ndarray | None, eps: float, groups: int = 1
    ) -> Norm:
        return Norm(x=x, weight=weight, eps=eps, groups=groups)

    def linear(  # type: ignore[override]
        self, x: Any, weight: Weight, bias: np.ndarray | None = None
    ) -> Product:
        return Product(x=x, weight=weight, bias=bias)

    def rope(self, x: Any, num_heads: int, rope: Rope) -> Rotate:  # type: ignore[override]
        return Rotate(x=x, heads=num_heads, rope=rope)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        assert sinks is None and biases is None, "refused when the model is opened"
        rows, cache = self._device_rows(), self._cache
        assert cache is not None
        self._fuse_products([q, k, v])
        keys, values = (
            as_tensor(stored[layer], self.device) for stored in (cache.keys, cache.values)
        )
        rope = q.rope if isinstance(q, Rotate) else None
        if not isinstance(k, Rotate) or k.rope is not rope:
            rope = None
        (q, q_norm), (k, k_norm) = self._strip_head_ops(q, rope), self._strip_head_ops(k, rope)
        rotated = attention.store(
            q, k, self.force(v), keys, values, rows, shape,
            rope=None if rope is None else self.rotary_table(rope), q_norm=q_norm, k_norm=k_norm,
        )  # fmt: skip
        return attention.attend(
            rotated, keys, values, rows, layer, shape, splits=self.splits, dtype=self.product_dtype
        )

    def gated(self, gate: Any, up: Any, activation: Activation) -> torch.Tensor:
        if not isinstance(activation, str) or activation not in _FUSED:
            return super().gated(self.force(gate), self.force(up), activation)
        if isinstance(gate, Product) and isinstance(up, Product) and gate.x is up.x:
            packed = self.group((gate.weight, up.weight), gated=True)
            fusable = self._fusable(gate) and self._fusable(up)
            if packed is not None and fusable and gate.bias is None and up.bias is None:
                return self._product_of(gate, packed, None, activation=activation)
        return pointwise.gated(self.force(gate), self.force(up), activation, self.product_dtype)

    def add(self, x: Any, y: Any) -> torch.Tensor:
        if self._fusable(y):
            packed = self.packed(y.weight)
            return self._product_of(y, packed, y.bias, residual=self.force(x))
        return pointwise.add(self.force(x), self.force(y))

    def scale(self, x: Any, factor: float) -> torch.Tensor:
        return pointwise.scale(self.force(x), factor)

    def softcap(self, x: Any, cap: float) -> torch.Tensor:
        return pointwise.softcap(self.force(x), cap)

    def experts(
        self,
        x: Any,
        router: Any,
        weights: ExpertWeights,
        routing: Routing,
        activation: Activation,
    ) -> torch.Tensor:
        self.has_routed = True
        for weight in weights.matrices:
            self.packed(weight)
        # What remains is the reference's arithmetic between the products, which is batch-invariant
        # too.
        product_dtype, self.product_dtype = self.product_dtype, torch.float32
        try:
            return super().experts(self.force(x), self.force(router), weights, routing, activation)
        finally:
            self.product_dtype = product_dtype

    def expert_products(
        self, x: Any, router: Any, matrices: Sequence[Weight], routing: Routing, groups: int
    ) -> torch.Tensor:
        return self._attention_experts(
            super().expert_products, x, router, matrices, routing, groups
        )

    def expert_sums(
        self, x: Any, router: Any, matrices: Sequence[Weight], routing: Routing, groups: int
    ) -> torch.Tensor:
        return self._attention_experts(super().expert_sums, x, router, matrices, routing, groups)

    def _attention_experts(
        self,
        compute: Callable[..., torch.Tensor],
        x: Any,
        router: Any,
        matrices: Sequence[Weight],
        *options: Any,
    ) -> torch.Tensor:
        """An operation of the reference, as for `experts`."""
        self.has_routed = True
        for weight in matrices:
            self.packed(weight)
        product_dtype, self.product_dtype = self.product_dtype, torch.float32
        try:
            return compute(self.force(x), self.force(router), matrices, *options)
        finally:
            self.product_dtype = product_dtype

    # These run as operations of torch in the reference's order, which are captured as well.

    def layer_norm(
        self, x: Any, weight: np.ndarray, bias: np.ndarray | None, eps: float, groups: int = 1
    ) -> torch.Tensor:
        return super().layer_norm(self.force(x), weight, bias, eps, groups)

    def activate(self, x: Any, activation: str | Xielu) -> torch.Tensor:
        return super().activate(self.force(x), activation)

    def add_positions(self, x: Any, table: Weight) -> torch.Tensor:
        return super().add_positions(self.force(x), table)

    def _row_positions(self) -> torch.Tensor:
        return self._device_rows().positions.long()

    def gate_parts(self, x: Any, gate: Any, activation: str) -> torch.Tensor:
        return super().gate_parts(self.force(x), self.force(gate), activation)

    def embed(self, tokens: torch.Tensor, weight: Weight, factor: float) -> torch.Tensor:
        """float32 embeddings of int32 `tokens` on the device, times `factor`."""
        return pointwise.embed(tokens, self.packed(weight), factor)

    # --- lazy values

    def _device_rows(self) -> DeviceRows:
        if self.rows is None:
            raise RuntimeError("`bind` must be called before the operations of a pass")
        return self.rows

    def _fusable(self, value: Any) -> bool:
        """Whether a value is a product that is not computed yet and that no adapter changes."""
        return isinstance(value, Product) and value.result is None and self._adapters() is None

    def _linear(
        self,
        x: Any,
        weight: Weight,
        bias: np.ndarray | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        """The product plus each row's adapter update, in the reference's order of operations."""
        y = self._with_norm(x, self.packed(weight), bias)
        if adapters is None or self._bound is None:
            return y
        for number in np.unique(adapters[adapters >= 0]):
            update = self._bound.adapters[number].get(weight.name)
            if update is not None:
                index = torch.from_numpy(np.flatnonzero(adapters == number)).to(self.device)
                low = product(self.force(x)[index], self.packed(update.down))
                y[index] = y[index] + product(low, self.packed(update.up)) * update.scale
        return y

    def _product_of(
        self, value: Product, packed: Packed, bias: np.ndarray | None, **options: Any
    ) -> torch.Tensor:
        adapters = self._adapters()
        if adapters is not None:
            return self._linear(value.x, value.weight, bias, adapters)
        if options.get("activation"):
            options["dtype"] = self.product_dtype
        return self._with_norm(value.x, packed, bias, **options)

    def _with_norm(
        self, x: Any, packed: Packed, bias: np.ndarray | None, **options: Any
    ) -> torch.Tensor:
        if bias is not None:
            options["bias"] = self._vector(bias)
        is_fusable = (
            isinstance(x, Norm) and x.result is None and x.groups == 1 and x.weight is not None
        )
        if is_fusable and packed.tile.splits == 1:
            weight = self._vector(x.weight)
            return product(self.force(x.x), packed, norm=weight, eps=x.eps, **options)
        return product(self.force(x), packed, **options)

    def _fuse_products(self, values: list[Any]) -> None:
        """Compute the products under the values in one launch, where they share an input."""
        bases = []
        for value in values:
            while isinstance(value, Rotate) or (isinstance(value, Norm) and value.groups > 1):
                value = value.x
            bases.append(value)
        first = bases[0]
        if not all(isinstance(base, Product) and base.x is first.x for base in bases):
            return
        packed = self.group(tuple(base.weight for base in bases))
        if any(not self._fusable(base) or base.bias is not None for base in bases):
            return
        if packed is not None:
            whole = self._product_of(first, packed, None)
            parts = torch.split(whole, [base.weight.out_features for base in bases], 1)
            for base, part in zip(bases, parts, strict=True):
                base.result = part

    def _strip_head_ops(
        self, value: Any, rope: Rope | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """A value before the rotation `rope` and the norm of its heads; that norm (weight, eps)."""
        if rope is not None:
            value = value.x
        if isinstance(value, Norm) and value.result is None and value.groups > 1:
            x = self.force(value.x)
            if value.weight is not None and value.weight.size == x.shape[1] // value.groups:
                return x, (self._vector(value.weight), value.eps)
        return self.force(value), None

    def rotary_table(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        if rope not in self._rotary:
            table = RotaryTable(rope, self.device)
            max_position = 0 if self._bound is None else self._bound.max_position
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            table.rows(first, max(_MIN_POSITIONS - 1, max_position))
            self._rotary[rope] = table
        return self._rotary[rope].tables


def all_take_bfloat16(weights: Sequence[Weight]) -> bool:
    """Whether all products with these weights round their inputs to bfloat16."""
    return all(w.format not in ("F32", "F16") for w in weights)

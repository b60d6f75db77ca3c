"""The operations of a transformer in Triton.

Norms, products and rotations are values that are computed late: whatever needs one may take it in.
So a norm becomes part of the product behind it, three products of one input become one launch, a
gate and its product one kernel, a residual the end of a product, and the rotation, the norm of
heads and the cache write one kernel. What is fused depends on the network alone, never on the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from anydecode.kernels.interface import Adapter, Attention, KeyValues, Rope, Rows, Weight
from anydecode.kernels.reference import ReferenceBackend

_LEAST_POSITIONS = 1024


@dataclass(eq=False)
class LazyValue:
    """A value that is computed when it is needed."""

    result: torch.Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Norm(LazyValue):
    x: Any
    weight: torch.Tensor | None
    eps: float
    groups: int


@dataclass(eq=False, kw_only=True)
class Product(LazyValue):
    x: Any
    weight: Weight
    bias: torch.Tensor | None


@dataclass(eq=False, kw_only=True)
class Rotate(LazyValue):
    x: Any
    heads: int
    rope: Rope


class TritonBackend(ReferenceBackend):
    """Values are float32 tensors `[m, width]` on the kernels' device, or `LazyValue`; `force`
    makes a
    tensor of either. Weights and vectors are moved to the device and packed at their first use.

    Routing of experts is the reference's, in front of these products; it waits for the host, so
    passes of such models are not captured. `narrow`: the type in which what only a product reads
    is handed on (bfloat16 where all products take that).
    """

    name = "triton"

    def __init__(
        self, device: str | torch.device | None = None, splits: int = attention.SPLITS
    ) -> None:
        super().__init__(device or kernel_device())
        self.splits = splits
        self.narrow = torch.float32
        self.rows: DeviceRows | None = None
        self.num_bytes = 0
        self.routes = False  # whether experts have been routed, on the host
        self._cache: KeyValues | None = None
        self._packed: dict[Weight, Packed] = {}
        self._groups: dict[tuple[Weight, ...], Packed] = {}
        self._vectors: dict[torch.Tensor, torch.Tensor] = {}

    # --- what the values stand for

    def bind(
        self, rows: Rows, index: np.ndarray, cache: KeyValues, adapters: Sequence[Adapter] = ()
    ) -> None:
        super().bind(rows, index, cache, adapters)
        self.grow_tables(int(rows.positions[index].max(initial=0)))
        self.bind_device(to_device(rows, index, self.device), cache)

    def bind_device(self, rows: DeviceRows, cache: KeyValues) -> None:
        """Rows that already lie on the device, none of them with an adapter."""
        self.rows, self._cache = rows, cache

    def unbind(self) -> None:
        super().unbind()
        self.rows = None

    def grow_tables(self, highest: int) -> bool:
        """Make all rotary tables reach position `highest`; whether any of them has moved. They are
        doubled, since captured passes have to be captured again."""
        moved = False
        for table in self._rotary.values():
            if highest >= len(table.tables[0]):
                place = torch.zeros(1, dtype=torch.int64, device=self.device)
                table.rows(place, triton.next_power_of_2(highest + 1) - 1)
                moved = True
        return moved

    def force(self, value: Any) -> torch.Tensor:
        """The tensor a value stands for."""
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
        return attention.turn(x, value.heads, rows, self._rotary_table(value.rope))

    # --- weights

    def packed(self, weight: Weight) -> Packed:
        """A weight as the kernels read it."""
        if weight not in self._packed:
            self._packed[weight] = pack([weight], self.device)
            self.num_bytes += self._packed[weight].num_bytes
        return self._packed[weight]

    def group(self, weights: tuple[Weight, ...], gated: bool = False) -> Packed | None:
        """Weights of one input as one matrix; None where they have different formats."""
        if weights not in self._groups:
            first = weights[0]
            if any((w.format, w.in_features) != (first.format, first.in_features) for w in weights):
                return None
            whole = self._groups[weights] = pack(weights, self.device, gated)
            self.num_bytes += whole.num_bytes
            start = 0
            for weight in weights:
                self._packed[weight] = whole.rows(start, start + weight.out_features)
                start += weight.out_features
        return self._groups[weights]

    def _vector(self, vector: torch.Tensor) -> torch.Tensor:
        if vector not in self._vectors:
            self._vectors[vector] = vector.to(self.device, torch.float32).contiguous()
        return self._vectors[vector]

    # --- operations

    def rms_norm(  # type: ignore[override]
        self, x: Any, weight: torch.Tensor | None, eps: float, groups: int = 1
    ) -> Norm:
        return Norm(x=x, weight=weight, eps=eps, groups=groups)

    def linear(  # type: ignore[override]
        self, x: Any, weight: Weight, bias: torch.Tensor | None = None
    ) -> Product:
        return Product(x=x, weight=weight, bias=bias)

    def rope(self, x: Any, num_heads: int, rope: Rope) -> Rotate:  # type: ignore[override]
        return Rotate(x=x, heads=num_heads, rope=rope)

    def attention(self, q: Any, k: Any, v: Any, layer: int, shape: Attention) -> torch.Tensor:
        rows, cache = self._device_rows(), self._cache
        assert cache is not None
        self._together([q, k, v])
        keys, values = cache.keys[layer], cache.values[layer]
        rope = q.rope if isinstance(q, Rotate) else None
        if not isinstance(k, Rotate) or k.rope is not rope:
            rope = None
        (q, q_norm), (k, k_norm) = self._heads(q, rope), self._heads(k, rope)
        turned = attention.store(
            q, k, self.force(v), keys, values, rows, shape,
            rope=None if rope is None else self._rotary_table(rope), q_norm=q_norm, k_norm=k_norm,
        )  # fmt: skip
        return attention.attend(
            turned, keys, values, rows, layer, shape, splits=self.splits, dtype=self.narrow
        )

    def gated(self, gate: Any, up: Any, activation: str) -> torch.Tensor:
        if isinstance(gate, Product) and isinstance(up, Product) and gate.x is up.x:
            packed = self.group((gate.weight, up.weight), gated=True)
            fusable = self._fusable(gate) and self._fusable(up)
            if packed is not None and fusable and gate.bias is None and up.bias is None:
                return self._product_of(gate, packed, None, activation=activation)
        return pointwise.gated(self.force(gate), self.force(up), activation, self.narrow)

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
        gate: list[Weight],
        up: list[Weight],
        down: list[Weight],
        top_k: int,
        normalise: bool,
        activation: str,
    ) -> torch.Tensor:
        self.routes = True
        for weight in (*gate, *up, *down):
            self.packed(weight)
        # Only the reference's own arithmetic between the products remains; it is bitwise so too.
        narrow, self.narrow = self.narrow, torch.float32
        try:
            return super().experts(
                self.force(x), self.force(router), gate, up, down, top_k, normalise, activation
            )
        finally:
            self.narrow = narrow

    def embed(self, tokens: torch.Tensor, weight: Weight, factor: float) -> torch.Tensor:
        """Rows float32 of int32 `tokens` on the device, times `factor`."""
        return pointwise.embed(tokens, self.packed(weight), factor)

    # --- how they are computed

    def _device_rows(self) -> DeviceRows:
        if self.rows is None:
            raise RuntimeError("bind the rows of the pass before its operations")
        return self.rows

    def _fusable(self, value: Any) -> bool:
        """Whether a value is a product that nobody has needed yet and that no adapter changes."""
        return isinstance(value, Product) and value.result is None and self._adapters() is None

    def _linear(
        self,
        x: Any,
        weight: Weight,
        bias: torch.Tensor | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        """The product with each row's adapter; the delta in the reference's order."""
        y = self._with_norm(x, self.packed(weight), bias)
        if adapters is None or self._bound is None:
            return y
        for number in np.unique(adapters[adapters >= 0]):
            delta = self._bound.adapters[number].get(weight.name)
            if delta is not None:
                at = torch.from_numpy(np.flatnonzero(adapters == number)).to(self.device)
                low = product(self.force(x)[at], self.packed(delta.down))
                y[at] = y[at] + product(low, self.packed(delta.up)) * delta.scale
        return y

    def _product_of(
        self, value: Product, packed: Packed, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        adapters = self._adapters()
        if adapters is not None:
            return self._linear(value.x, value.weight, bias, adapters)
        if options.get("activation"):
            options["dtype"] = self.narrow
        return self._with_norm(value.x, packed, bias, **options)

    def _with_norm(
        self, x: Any, packed: Packed, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        if bias is not None:
            options["bias"] = self._vector(bias)
        late = isinstance(x, Norm) and x.result is None and x.groups == 1 and x.weight is not None
        if late and packed.tile.splits == 1:
            weight = self._vector(x.weight)
            return product(self.force(x.x), packed, norm=weight, eps=x.eps, **options)
        return product(self.force(x), packed, **options)

    def _together(self, values: list[Any]) -> None:
        """Compute the products that values start from in one launch, where they share an input."""
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

    def _heads(
        self, value: Any, rope: Rope | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """What a value is before the rotation `rope` and the norm of its heads, and that norm."""
        if rope is not None:
            value = value.x
        if isinstance(value, Norm) and value.result is None and value.groups > 1:
            x = self.force(value.x)
            if value.weight is not None and value.weight.numel() == x.shape[1] // value.groups:
                return x, (self._vector(value.weight), value.eps)
        return self.force(value), None

    def _rotary_table(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        if rope not in self._rotary:
            table = RotaryTable(rope.frequencies, rope.factor, self.device)
            highest = 0 if self._bound is None else self._bound.highest
            place = torch.zeros(1, dtype=torch.int64, device=self.device)
            table.rows(place, max(_LEAST_POSITIONS - 1, highest))
            self._rotary[rope] = table
        return self._rotary[rope].tables


def is_narrow(weights: Sequence[Weight]) -> bool:
    """Whether all products with these weights take their inputs as bfloat16."""
    return all(w.format not in ("F32", "F16") for w in weights)

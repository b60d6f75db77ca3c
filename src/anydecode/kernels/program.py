"""Records a network as a program: an array of C structs for the prologue, layers and head."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anydecode.kernels.interface import (
    RULES,
    Activation,
    Attention,
    Backend,
    Biases,
    CappedSwiglu,
    ClampedSwiglu,
    ExpertWeights,
    LimitedSwiglu,
    NgramHash,
    Recurrence,
    RecurrenceWeights,
    RelativePositions,
    Rope,
    Routing,
    SituGlu,
    Weight,
    WkvWeights,
    Xielu,
)
from anydecode.kernels.library import Matrix, Op
from anydecode.kernels.library import Recurrence as RecurrenceStruct
from anydecode.kernels.library import Routing as RoutingStruct
from anydecode.kernels.mapped import address_of
from anydecode.kernels.packing import FLOAT_FORMATS, Packer, float_vector
from anydecode.kernels.placement import arrange, assign_result, place, to_ops
from anydecode.kernels.steps import LOGITS, STREAM, Code, Step, Value

_ACTIVATIONS = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "sigmoid": 4,
    "identity": 5,
    "relu2": 6,
    "relu": 7,
    "softplus": 9,
    "signed_root": 13,
    "exp": 14,
}
_PRODUCTS, _SUMS = 1, 2  # kinds of experts with one matrix each
_CLAMPED_SWIGLU, _XIELU, _CAPPED_SWIGLU, _LIMITED_SWIGLU, _SITU_GLU = 3, 8, 10, 11, 12
_BLOCK_FLOATS = 12  # one block of 32 quantised activations takes 48 bytes
# Attention with one key head processes up to so many query heads in one part. All query heads of
# eight rows would not fit a processor's cache.
_LATENT_GROUP = 8


class NativeBackend(Backend):
    """Records the operations of a network. Values are symbolic; nothing is computed."""

    name = "native"

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self.steps: list[Step] = []
        self.tables: dict[Rope, Value] = {}
        self.adapted: Collection[str] = ()
        self.targets: list[str] = []
        self.keepalive: list[Any] = []  # objects that the ops point to
        self.shapes: list[Attention] = []
        self.index_dims: set[int] = set()
        self.selections: dict[tuple[Any, ...], int] = {}  # by kind, see `_selection`
        self.selected: Value | None = None  # stands for the positions that a layer has selected
        self.recurrences: list[Recurrence] = []
        self.shared_steps: list[Step] = []  # those that compute the shared values
        self.shared_values: dict[Any, Value] = {}
        self._quantised: dict[tuple[Value, bytes], Value] = {}

    def begin(self) -> None:
        """Start a new list of steps. Only the rotary tables and the values of `shared` are shared
        between lists."""
        self.steps = []
        self.selected = None
        self._quantised = {}

    def _record(self, code: Code, inputs: tuple[Value, ...], width: int, **fields: Any) -> Value:
        out = Value(width)
        fields = {"width": inputs[0].width, "width_out": width, **fields}
        self.steps.append(Step(code, inputs, out, fields))
        return out

    def _keep_vector(self, values: np.ndarray) -> int:
        vector = float_vector(values)
        self.keepalive.append(vector)
        return address_of(vector)

    def _input(self, x: Value, weight: Weight) -> Value:
        """x in the form that a product with this weight, or one like it, reads."""
        if weight.format in FLOAT_FORMATS:
            return x
        key = (x, _order_bytes(weight))
        if key not in self._quantised:
            fields: dict[str, Any] = {}
            if weight.order is not None:
                self.keepalive.append(weight.order)
                fields["weight"] = address_of(weight.order)
            width = x.width // 32 * _BLOCK_FLOATS
            self._quantised[key] = self._record(Code.QUANTISE, (x,), width, **fields)
        return self._quantised[key]

    def rms_norm(self, x: Value, weight: np.ndarray | None, eps: float, groups: int = 1) -> Value:
        fields: dict[str, Any] = {"groups": groups, "x": eps}
        if weight is not None:
            fields |= {"weight": self._keep_vector(weight), "count": weight.size}
        return self._record(Code.NORM, (x,), x.width, **fields)

    def linear(self, x: Value, weight: Weight, bias: np.ndarray | None = None) -> Value:
        matrix = self._packer.pack(weight)
        fields: dict[str, Any] = {"matrix": ctypes.addressof(matrix)}
        if bias is not None:
            fields["weight"] = self._keep_vector(bias)
        y = self._record(Code.LINEAR, (self._input(x, weight),), weight.out_features, **fields)
        self._add_lora(x, y, [weight])
        return y

    def _add_lora(self, x: Value, y: Value, weights: Sequence[Weight]) -> None:
        """Add the adapters' updates of products of equal parts of x to those of y."""
        if any(weight.name in self.adapted for weight in weights):
            count, groups = self._add_targets(weights), len(weights)
            fields = {"count": count, "groups": groups}
            fields |= {"width": x.width // groups, "width_out": y.width // groups}
            self.steps.append(Step(Code.LORA, (x, y), y, fields))

    def grouped_linear(self, x: Value, weights: Sequence[Weight]) -> Value:
        matrices = [self._packer.pack(weight) for weight in weights]
        pointers = (ctypes.c_void_p * len(matrices))(*map(ctypes.addressof, matrices))
        self.keepalive.append(pointers)
        fields = {"count": len(matrices), "experts": ctypes.addressof(pointers)}
        width = len(weights) * weights[0].out_features
        inputs = (self._input(x, weights[0]),)
        y = self._record(Code.GROUPED_LINEAR, inputs, width, **fields)
        self._add_lora(x, y, weights)
        return y

    def split(self, x: Value, size: int, groups: int = 1) -> tuple[Value, Value]:
        first = self._record(Code.SPLIT, (x,), groups * size, groups=groups)
        rest = x.width - first.width
        return first, self._record(Code.SPLIT, (x,), rest, groups=groups, count=size)

    def join(self, x: Value, y: Value, groups: int = 1) -> Value:
        return self._record(Code.JOIN, (x, y), x.width + y.width, groups=groups)

    def _add_targets(self, weights: Sequence[Weight]) -> int:
        """Append the weights to the adapters' targets; return the index of the first."""
        self.targets += [weight.name for weight in weights]
        return len(self.targets) - len(weights)

    def rope(self, x: Value, num_heads: int, rope: Rope) -> Value:
        half = rope.frequencies.size
        table = self.tables.setdefault(rope, Value(2 * half))
        fields = {"heads": num_heads, "head_dim": x.width // num_heads, "count": half}
        fields["groups"] = int(rope.has_last_pairs)
        return self._record(Code.ROPE, (x, table), x.width, **fields)

    def store(
        self,
        k: Value | None,
        v: Value | None,
        layer: int,
        shape: Attention,
        index_key: Value | None = None,
    ) -> None:
        fields = {**_cache_fields(layer, shape), "kv_heads": shape.num_stored_keys}
        if k is not None:
            inputs = (k,) if v is None else (k, v)
            own = {**fields, "width": k.width}
            self.steps.append(Step(Code.STORE, inputs, None, own, cache="write"))
        if index_key is not None:
            fields = {**fields, "width": index_key.width}
            self.steps.append(Step(Code.STORE_INDEX, (index_key,), None, fields, cache="write"))

    def select(
        self,
        q: Value | None,
        weights: Value | np.ndarray | None,
        num_heads: int,
        layer: int,
        shape: Attention,
    ) -> None:
        fields = {**_cache_fields(layer, shape), "heads": num_heads}
        fields |= {"groups": shape.num_selections}
        fields |= {"block": shape.index_block, "num_local": shape.local_blocks}
        fields |= {"has_block_keys": int(shape.has_block_keys)}
        fields |= {"selection": self._selection(shape), "window": shape.window or 0}
        scores: tuple[Value, ...] = ()
        if q is not None:
            own = dict(fields)
            if isinstance(weights, np.ndarray):
                own["weight"], weights = self._keep_vector(weights), None
            inputs = (q,) if weights is None else (q, weights)
            scores = (self._record(Code.INDEX, inputs, 1, **own),)
            self.steps[-1].cache = "read"
            self.index_dims.add(q.width // num_heads)
        self.selected, count = Value(1), int(q is not None)
        self.steps.append(Step(Code.SELECT, scores, self.selected, {**fields, "count": count}))

    def attend(
        self,
        q: Value,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> Value:
        fields = _cache_fields(layer, shape)
        window = shape.window or 0
        if shape.is_selected:
            fields["selection"], window = self._selection(shape), 0  # its table has the window
        if shape.latent_dim is not None:  # parts of the query heads are processed separately
            parts = range(min(shape.num_heads, _LATENT_GROUP), 0, -1)
            group = next(size for size in parts if shape.num_heads % size == 0)
            shape = replace(shape, num_kv_heads=shape.num_heads // group)
        self.shapes.append(shape)
        fields |= {"heads": shape.num_heads, "kv_heads": shape.num_kv_heads}
        limits: dict[str, Any] = {"window": window, "chunk": shape.chunk or 0}
        limits["count"] = int(shape.is_two_sided)
        limits |= {"x": shape.scale, "y": shape.softcap or 0.0}
        if sinks is not None:
            limits["weight"] = self._keep_vector(sinks)
        if shape.slopes is not None:
            limits["slopes"] = self._keep_vector(np.array(shape.slopes, np.float32))
        if isinstance(biases, RelativePositions):
            limits["slopes"] = self._keep_vector(_relative_vectors(biases))
            limits["reach"], limits["groups"] = biases.reach, biases.keys.shape[1]
        elif biases is not None:
            limits["slopes"] = self._keep_vector(biases.ravel())
            limits["reach"] = biases.shape[1] // 2
        width = shape.num_heads * shape.value_dim
        inputs = (q,) if self.selected is None else (q, self.selected)
        out = self._record(Code.ATTEND, inputs, width, **fields, **limits)
        self.steps[-1].cache = "read"
        limits |= {"width": width, "width_out": width}
        self.steps.append(Step(Code.MERGE, (out,), out, {**fields, **limits}))
        return out

    def _selection(self, shape: Attention) -> int:
        """The number, from 1 on, of the kind of selection of layers of this shape."""
        return self.selections.setdefault(shape.selection_kind, len(self.selections) + 1)

    def ngram_rows(
        self, table: Weight, layer: int, shape: Recurrence, first: int, hashes: NgramHash
    ) -> Value:
        fields = {"layer": layer, "recurrence": self._keep_recurrence(shape)}
        tokens = Value(1)
        end = {"width": 1, "width_out": 1, "count": hashes.end_token}
        self.steps.append(Step(Code.TOKEN, (), tokens, end))
        self._store_inputs((tokens,), first, fields)
        numbers = np.concatenate([hashes.multipliers, hashes.sizes, hashes.offsets])
        self.keepalive.append(numbers)
        out, heads = Value(len(hashes.sizes) * table.in_features), len(hashes.sizes)
        fields |= {"count": first, "window": hashes.order, "groups": heads}
        fields |= {"chunk": hashes.end_token, "weight": address_of(numbers)}
        fields |= {"matrix": ctypes.addressof(self._packer.pack(table))}
        fields |= {"width": out.width, "width_out": out.width}
        self.steps.append(Step(Code.NGRAM, (tokens,), out, fields, cache="read"))
        return out

    def pool(
        self, x: Value, layer: int, shape: Recurrence, first: int, bias: np.ndarray | None
    ) -> Value:
        fields = {"layer": layer, "recurrence": self._keep_recurrence(shape)}
        self._store_inputs((x,), first, fields)
        size, groups, numbers = (shape.window, 1, x.width) if bias is None else bias.shape
        fields |= {"count": first, "entry": size, "groups": groups}
        if bias is not None:
            fields["weight"] = self._keep_vector(bias.ravel())
        out = self._record(Code.POOL, (x,), numbers, **fields)
        self.steps[-1].cache = "read"
        return out

    def hyper_factors(self, x: Value, streams: int, iterations: int, eps: float) -> Value:
        fields = {"groups": streams, "count": iterations, "x": eps}
        return self._record(Code.HYPER, (x,), x.width, **fields)

    def softmax(self, x: Value) -> Value:
        return self._record(Code.SOFTMAX, (x,), x.width)

    def collapse(self, x: Value, factors: Value, groups: int) -> Value:
        return self._record(Code.COLLAPSE, (x, factors), x.width // groups, groups=groups)

    def convolution(
        self, x: Value, layer: int, shape: Recurrence, weights: RecurrenceWeights
    ) -> Value:
        fields = {"layer": layer, "recurrence": self._keep_recurrence(shape, weights)}
        self._store_inputs((x,), 0, fields)
        out = self._record(Code.CONVOLVE, (x,), shape.width, **fields)
        self.steps[-1].cache = "read"
        return out

    def recurrence(
        self,
        x: Value | None,
        gates: Sequence[Value],
        layer: int,
        shape: Recurrence,
        weights: RecurrenceWeights | WkvWeights,
    ) -> Value:
        fields = {"layer": layer, "recurrence": self._keep_recurrence(shape, weights)}
        inputs = tuple(gates) if x is None else (x, *gates)
        self._store_inputs(inputs, shape.width if x is None else 0, fields)
        out = self._record(Code.SCAN, inputs, shape.width_out, **fields)
        self.steps[-1].cache = "read"
        self.recurrences.append(shape)
        return out

    def shift(
        self, x: Value, layer: int, shape: Recurrence, first: int, mixes: Sequence[np.ndarray]
    ) -> list[Value]:
        fields = {"layer": layer, "recurrence": self._keep_recurrence(shape), "count": first}
        self._store_inputs((x,), first, fields)
        return [self._shifted(x, self._keep_vector(mix), fields) for mix in mixes]

    def _shifted(self, x: Value, mix: int, fields: Mapping[str, Any]) -> Value:
        out = self._record(Code.SHIFT, (x,), x.width, weight=mix, **fields)
        self.steps[-1].cache = "read"
        return out

    def stored(self, layer: int, shape: Recurrence, first: int, size: int) -> Value:
        out, fields = Value(size), {"layer": layer, "count": first, "width": size}
        fields["recurrence"] = self._keep_recurrence(shape)
        self.steps.append(Step(Code.STORED, (), out, {**fields, "width_out": size}, cache="read"))
        return out

    def _store_inputs(self, inputs: Sequence[Value], first: int, fields: Mapping[str, Any]) -> None:
        """Record that inputs of a recurrence are stored, from number `first` of a slot on."""
        for part in inputs:
            store = {**fields, "width": part.width, "count": first}
            self.steps.append(Step(Code.STORE_INPUTS, (part,), None, store, cache="write"))
            first += part.width

    def _keep_recurrence(
        self, shape: Recurrence, weights: RecurrenceWeights | WkvWeights | None = None
    ) -> int:
        """The address of the C struct for a recurrence and its vectors, if it reads these."""
        struct = RecurrenceStruct(
            rule=RULES.index(shape.rule),
            width=shape.width,
            window=shape.window,
            activation=_ACTIVATIONS[shape.activation or "identity"],
            heads=shape.num_heads,
            head_dim=shape.head_dim,
            groups=shape.num_groups,
            state_size=shape.state_size,
            num_gates=shape.num_gates,
            min_step=shape.step_limits[0],
            max_step=shape.step_limits[1],
            has_tiled_keys=int(shape.has_tiled_keys),
            norm_eps=shape.norm_eps,
            max_strength=shape.max_strength,
            min_exponent=shape.min_exponent,
        )
        for name, vector in vars(weights).items() if weights is not None else ():
            if vector is not None:
                vector = np.ascontiguousarray(vector.T) if name == "conv" else vector
                setattr(struct, name, self._keep_vector(vector))
        self.keepalive.append(struct)
        return ctypes.addressof(struct)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        fields = _activation_fields(activation)
        return self._record(Code.GATED, (gate, up), gate.width, **fields)

    def add(self, x: Value, y: Value) -> Value:
        return self._record(Code.ADD, (x, y), x.width)

    def scale(self, x: Value, factor: float) -> Value:
        return self._record(Code.SCALE, (x,), x.width, x=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._record(Code.SOFTCAP, (x,), x.width, x=cap)

    def clamp(self, x: Value, limit: float) -> Value:
        return self._record(Code.CLAMP, (x,), x.width, x=limit)

    def multiply(self, x: Value, factors: np.ndarray) -> Value:
        return self._record(Code.MULTIPLY, (x,), x.width, weight=self._keep_vector(factors))

    def cut_off(self, x: Value, multiplier: float) -> Value:
        return self._record(Code.CUT_OFF, (x,), x.width, x=multiplier)

    def match_magnitude(self, x: Value, like: Value) -> Value:
        return self._record(Code.MATCH_MAGNITUDE, (x, like), x.width)

    def mix(self, x: Value, coefficients: Value, groups: int) -> Value:
        return self._record(Code.MIX, (x, coefficients), x.width, groups=groups)

    def block_convolution(
        self, x: Value, kernels: Value, base: np.ndarray, mask_token: int
    ) -> Value:
        taps = len(base)
        fields = {"count": taps, "groups": kernels.width // taps, "window": mask_token}
        fields["weight"] = self._keep_vector(base.ravel())
        return self._record(Code.BLOCK_CONVOLVE, (x, kernels), x.width, **fields)

    def spread(self, x: Value, factors: Value | np.ndarray, groups: int) -> Value:
        fields: dict[str, Any] = {"groups": groups}
        inputs = (x, factors) if isinstance(factors, Value) else (x,)
        if isinstance(factors, np.ndarray):
            fields["weight"] = self._keep_vector(factors)
        return self._record(Code.SPREAD, inputs, groups * x.width, **fields)

    def experts(
        self,
        x: Value,
        router: Value,
        weights: ExpertWeights,
        routing: Routing,
        activation: Activation,
    ) -> Value:
        gate, up, down, top_k = weights.gate, weights.up, weights.down, routing.experts_per_token
        gate = gate or up
        matrices = [self._packer.pack(weight) for weight in (*gate, *up, *down)]
        pointers = (ctypes.c_void_p * len(matrices))(*map(ctypes.addressof, matrices))
        self.keepalive.append(pointers)
        inner, width_out = gate[0].out_features, down[0].out_features
        has_two_orders = any(
            _order_bytes(one) != _order_bytes(other) for one, other in zip(gate, up, strict=True)
        )
        quantised = max(x.width * (1 + has_two_orders), inner) // 32 * _BLOCK_FLOATS
        per_slot = 3 + x.width + 2 * inner + width_out + quantised
        count = len(gate) + routing.num_identity
        fields = {"groups": top_k, "count": count, **_activation_fields(activation)}
        fields["routing"] = self._keep_routing(weights, routing)
        fields["heads"] = int(any(w.format not in FLOAT_FORMATS for w in (*gate, *up)))
        fields["head_dim"] = int(any(w.format not in FLOAT_FORMATS for w in down))
        fields["kv_heads"] = int(has_two_orders)
        adapted = any(weight.name in self.adapted for weight in weights.matrices)
        fields["layer"] = self._add_targets([*gate, *up, *down]) if adapted else -1
        fields["experts"] = ctypes.addressof(pointers)
        out = self._record(Code.EXPERTS, (x, router), width_out, **fields)
        num_logits = count * routing.logits_per_expert
        self.steps[-1].scratch = Value(top_k * per_slot + count + 4 * num_logits + 16)
        return out

    def layer_norm(
        self, x: Value, weight: np.ndarray, bias: np.ndarray | None, eps: float, groups: int = 1
    ) -> Value:
        both = np.concatenate([weight, np.zeros_like(weight) if bias is None else bias])
        fields = {"groups": groups, "weight": self._keep_vector(both), "x": eps}
        return self._record(Code.LAYER_NORM, (x,), x.width, **fields)

    def activate(self, x: Value, activation: str | Xielu) -> Value:
        if isinstance(activation, Xielu):
            numbers = self._keep_vector(np.array(activation, np.float32))
            return self._record(Code.ACTIVATE, (x,), x.width, activation=_XIELU, weight=numbers)
        return self._record(Code.ACTIVATE, (x,), x.width, activation=_ACTIVATIONS[activation])

    def add_positions(self, x: Value, table: Weight) -> Value:
        matrix = ctypes.addressof(self._packer.pack(table))
        out = self._record(Code.ADD_POSITION, (x,), x.width, matrix=matrix)
        self.steps[-1].scratch = Value(x.width)
        return out

    def expert_products(
        self,
        x: Value,
        router: Value,
        matrices: Sequence[Weight],
        routing: Routing,
        groups: int,
    ) -> Value:
        width = routing.experts_per_token * matrices[0].out_features
        return self._expert_matrices(x, router, matrices, routing, (_PRODUCTS, groups), width)

    def expert_sums(
        self,
        x: Value,
        router: Value,
        matrices: Sequence[Weight],
        routing: Routing,
        groups: int,
    ) -> Value:
        width = matrices[0].out_features
        return self._expert_matrices(x, router, matrices, routing, (_SUMS, groups), width)

    def _expert_matrices(
        self,
        x: Value,
        router: Value,
        matrices: Sequence[Weight],
        routing: Routing,
        layout: tuple[int, int],
        width_out: int,
    ) -> Value:
        """Experts of one matrix each; `layout`: what becomes of their products, and the parts."""
        count, top_k = len(matrices), routing.experts_per_token
        packed = [self._packer.pack(weight) for weight in matrices]
        pointers = (ctypes.c_void_p * count)(*map(ctypes.addressof, packed))
        self.keepalive.append(pointers)
        fields = {"groups": top_k, "count": count, "experts": ctypes.addressof(pointers)}
        weights = ExpertWeights([], list(matrices), [])
        fields["routing"] = self._keep_routing(weights, routing, layout)
        fields["heads"] = int(any(weight.format not in FLOAT_FORMATS for weight in matrices))
        adapted = any(weight.name in self.adapted for weight in matrices)
        fields["layer"] = self._add_targets(list(matrices)) if adapted else -1
        out = self._record(Code.EXPERTS, (x, router), width_out, **fields)
        size, rows = matrices[0].in_features, matrices[0].out_features
        per_slot = 3 + size + rows + size // 32 * _BLOCK_FLOATS
        num_logits = count * routing.logits_per_expert
        self.steps[-1].scratch = Value(top_k * per_slot + count + 4 * num_logits + 16)
        return out

    def _keep_routing(
        self, weights: ExpertWeights, routing: Routing, layout: tuple[int, int] = (0, 1)
    ) -> int:
        """The address of the C struct for the routing and the biases of experts."""
        struct = RoutingStruct(
            normalise=int(routing.normalise),
            is_sigmoid=int(routing.scoring in ("sigmoid", "sqrtsoftplus")),
            is_root=int(routing.scoring == "sqrtsoftplus"),
            num_groups=routing.num_groups,
            groups_per_row=routing.groups_per_token,
            scale=routing.scale,
            scores_per_group=routing.scores_per_group,
            scales_inputs=int(routing.scales_inputs),
            by_logits=int(routing.by_logits),
            is_given=int(routing.scoring == "given"),
            is_plain=int(not weights.gate),
            jitter=routing.jitter if routing.scoring == "sparsemixer" else -1.0,
            block_experts=routing.block_experts or 0,
            num_identity=routing.num_identity,
            logits_per_expert=routing.logits_per_expert,
            kind=layout[0],
            num_parts=layout[1],
        )
        if weights.token_experts is not None:
            self.keepalive.append(weights.token_experts)
            struct.token_experts = address_of(weights.token_experts)
            struct.num_tokens = len(weights.token_experts)
        for name in ("gate_bias", "up_bias", "down_bias"):
            biases = getattr(weights, name)
            if biases is not None:
                setattr(struct, name, self._keep_vector(np.concatenate(biases)))
        if routing.output_eps is not None:
            struct.output_eps = routing.output_eps
        for name in ("selection_bias", "factors", "output_factors"):
            vector = getattr(weights, name)
            if vector is not None:
                setattr(struct, name, self._keep_vector(vector))
        self.keepalive.append(struct)
        return ctypes.addressof(struct)

    def gate_parts(self, x: Value, gate: Value, activation: str) -> Value:
        fields = {"groups": gate.width, "activation": _ACTIVATIONS[activation]}
        return self._record(Code.GATE_PARTS, (x, gate), x.width, **fields)

    def columns(self, x: Value, first: int, size: int) -> Value:
        return self._record(Code.SPLIT, (x,), size, groups=1, count=first)

    def token_rows(self, table: Weight, factor: float, *, has_inputs: bool = False) -> Value:
        out = Value(table.in_features)
        matrix = ctypes.addressof(self._packer.pack(table))
        fields = {"width": out.width, "matrix": matrix, "x": factor, "count": int(has_inputs)}
        self.steps.append(Step(Code.TOKEN_ROW, (), out, fields))
        return out

    def shared(self, key: Any, compute: Callable[[], Value]) -> Value:
        if key not in self.shared_values:
            steps, quantised = self.steps, self._quantised
            self.begin()
            self.shared_values[key] = compute()
            self.shared_steps += self.steps
            self.steps, self._quantised = steps, quantised
        return self.shared_values[key]


def _relative_vectors(positions: RelativePositions) -> np.ndarray:
    """The columns, the keys and the queries, side by side; vectors end with zeros."""
    padding = [(0, 0), (0, 0), (0, -positions.keys.shape[-1] % 8)]
    vectors = [np.pad(one, padding).ravel() for one in (positions.keys, positions.queries)]
    return np.concatenate([positions.columns.astype(np.float32), *vectors])


def _cache_fields(layer: int, shape: Attention) -> dict[str, Any]:
    """The fields of an op that stores or reads a layer's keys and values."""
    is_latent = int(shape.latent_dim is not None)
    return {
        "layer": layer,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "is_latent": is_latent,
        "top_k": shape.top_k or 0,
        "index_dim": shape.index_dim or 0,
        "entry": shape.entry_size or 0,
    }


def _order_bytes(weight: Weight) -> bytes:
    """What tells the orders apart in which matrices store their inputs."""
    return b"" if weight.order is None else weight.order.tobytes()


def _activation_fields(activation: Activation) -> dict[str, Any]:
    """The fields of an op that apply an activation."""
    if isinstance(activation, ClampedSwiglu):
        return {"activation": _CLAMPED_SWIGLU, "x": activation.alpha, "y": activation.limit}
    if isinstance(activation, CappedSwiglu):
        return {"activation": _CAPPED_SWIGLU, "y": activation.limit}
    if isinstance(activation, LimitedSwiglu):
        return {"activation": _LIMITED_SWIGLU, "y": activation.limit}
    if isinstance(activation, SituGlu):
        return {"activation": _SITU_GLU, "x": activation.cap, "y": activation.up_cap or 0.0}
    return {"activation": _ACTIVATIONS[activation]}


@dataclass(eq=False)
class Program:
    """A recorded network: the ops of the prologue, the layers and the head in one array.

    `starts[l]` is the index of the first op of layer l, which captures the hidden states after l
    layers. `head` is the index of the head's first op. `body_floats` and `head_floats` are the
    workspace floats per row. `targets[i]` is the name of the i-th matrix that adapters change; a
    matrix that is used twice is listed twice.
    """

    ops: Any
    num_ops: int
    num_prologue: int
    starts: list[int]
    head: int
    body_floats: int
    head_floats: int
    shapes: list[Attention]
    index_dims: set[int]
    recurrences: list[Recurrence]
    embedding: Matrix
    targets: list[str]
    keepalive: list[Any]


def record(
    packer: Packer,
    embedding: Weight,
    embedding_scale: float,
    num_layers: int,
    layer: Callable[[Backend, Any, int], Any],
    head: Callable[[Backend, Any], Any],
    width: int,
    adapted: Collection[str],
    reads_states: bool = False,
) -> Program:
    """The program of a network whose `layer` and `head` are written against `Backend`.

    Args:
        width: Numbers per hidden state.
        adapted: Names of the matrices that adapters change.
        reads_states: Whether the hidden states of all rows start as `Rows.inputs`.
    """
    backend = NativeBackend(packer)
    backend.adapted = adapted
    matrix = packer.pack(embedding)
    layers: list[tuple[list[Step], Value]] = []
    for index in range(num_layers):
        backend.begin()
        result = layer(backend, Value(width, STREAM), index)
        layers.append((backend.steps, result))
    backend.begin()
    rows = Value(width)
    backend.steps.append(Step(Code.GATHER, (Value(width, STREAM),), rows, {"width": width}))
    logits = head(backend, rows)
    prologue, reserved, body = _prologue(backend, matrix, embedding_scale, width, reads_states)
    steps, starts = list(prologue), []
    for index, (layer_steps, result) in enumerate(layers):
        starts.append(len(steps))
        layer_steps = arrange(layer_steps)
        assign_result(layer_steps, result, STREAM)
        steps += [_capture(index, width), *layer_steps]
    starts.append(len(steps))
    steps.append(_capture(num_layers, width))
    body = max(body, place(steps[len(prologue) :], reserved))
    head_steps = arrange(backend.steps)
    assign_result(head_steps, logits, LOGITS)
    head_floats = place(head_steps, 0)
    ops = to_ops(steps) + to_ops(head_steps)
    array = (Op * len(ops))(*ops)
    return Program(
        array, len(ops), len(prologue), starts, len(steps), body, head_floats, backend.shapes,
        backend.index_dims, backend.recurrences, matrix, backend.targets, backend.keepalive,
    )  # fmt: skip


def _capture(layer: int, width: int) -> Step:
    return Step(Code.CAPTURE, (Value(width, STREAM),), None, {"layer": layer, "width": width})


def _prologue(
    backend: NativeBackend, matrix: Matrix, scale: float, width: int, reads_states: bool
) -> tuple[list[Step], int, int]:
    """The steps of the embedding, the rotary tables and the shared values, the floats per row that
    these reserve, and those that the steps use."""
    fields = {"width": width, "matrix": ctypes.addressof(matrix), "x": scale}
    fields["count"] = int(reads_states)
    steps, reserved = [Step(Code.EMBED, (), Value(width, STREAM), fields)], 0
    for rope, table in backend.tables.items():
        table.offset = reserved
        reserved += -(-table.width // 16) * 16
        fields = {"count": table.width // 2, "x": rope.factor}
        fields |= {"y": rope.growth, "window": rope.growth_period}
        fields["weight"] = backend._keep_vector(rope.frequencies)
        fields["groups"], fields["chunk"] = rope.growth_start, rope.shift
        steps.append(Step(Code.ROPE_TABLE, (), table, fields))
    for value in backend.shared_values.values():
        value.offset = reserved
        reserved += -(-value.width // 16) * 16
    used = place(backend.shared_steps, reserved)
    return steps + backend.shared_steps, reserved, used

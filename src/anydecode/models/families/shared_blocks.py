"""Blocks of attention and an MLP that several layers share (Glorioso et al., "Zamba: A Compact 7B
SSM Hybrid Model", arXiv:2405.16712, and "The Zamba2 Suite: Technical Report", arXiv:2411.15242).

The block is one of `num_mem_blocks` in turn. A checkpoint has each of them in one or all of its
layers, mostly in the first; Zamba2 has low-rank updates of its matrices for each of the layers.
"""

from __future__ import annotations

import numpy as np

from anydecode.models.families.recurrent import HYBRID
from anydecode.models.families.values import Config, bool_value, int_value, list_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT
from anydecode.models.linear import Linear, update_weights
from anydecode.models.network import GatedMlp, LayerWeights
from anydecode.models.spec import LayerSpec


def read_shared_block(
    reader: TensorReader, config: Config, spec: LayerSpec, layer: LayerWeights, index: int
) -> None:
    """Read attention and MLP of layer `index`."""
    types = list_value(config, "layer_types", str) or []
    hybrids = [i for i, kind in enumerate(types) if kind == HYBRID]
    place, count = hybrids.index(index), int_value(config, "num_mem_blocks", 1, high=MAX_COUNT)
    module = "shared_transformer" if "num_mem_blocks" in config else "shared_transf"
    names = [f"layers.{i}.{module}" for i in (index, *hybrids[place % count :: count])]
    name = next((n for n in names if reader.has(f"{n}.input_layernorm.weight")), names[1])
    _BlockReader(reader, config, name, place).read(layer, spec)


class _BlockReader:
    """Reads the block `name` for the layer that is the one at `place` of those with a block."""

    def __init__(self, reader: TensorReader, config: Config, name: str, place: int) -> None:
        self._reader, self._config, self._name, self._place = reader, config, name, place
        self._rank = int_value(config, "adapter_rank", 128, high=MAX_COUNT)
        self._hidden = int_value(config, "hidden_size")

    def read(self, layer: LayerWeights, spec: LayerSpec) -> None:
        reader, hidden, name = self._reader, self._hidden, self._name
        layer.attention_norm = reader.vector(f"{name}.input_layernorm.weight", 2 * hidden)
        layer.mlp_norm = reader.vector(f"{name}.pre_ff_layernorm.weight", hidden)
        shape = spec.attention
        assert shape is not None, "checked by `ModelSpec`"
        size, kv_size = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
        layer.query, layer.key, layer.value = (
            self._projection(part, (rows, 2 * hidden))
            for part, rows in (("q", size), ("k", kv_size), ("v", kv_size))
        )
        layer.output = reader.shared(f"{name}.self_attn.o_proj", (hidden, size), False)
        layer.mlp = self._mlp()

    def _projection(self, part: str, shape: tuple[int, int]) -> Linear:
        name = f"{self._name}.self_attn"
        linear = self._reader.shared(f"{name}.{part}_proj", shape, False)
        if bool_value(self._config, "use_shared_attention_adapter"):
            self._add_update(linear, f"{name}.linear_{part}_adapter_list", shape)
        return linear

    def _mlp(self) -> GatedMlp:
        inner, name = int_value(self._config, "intermediate_size"), f"{self._name}.feed_forward"
        if self._reader.has(f"{name}.gate_proj.weight"):  # without updates
            gate, up, down = (
                self._reader.shared(f"{name}.{part}_proj", size, False)
                for part, size in (
                    *((part, (inner, self._hidden)) for part in ("gate", "up")),
                    ("down", (self._hidden, inner)),
                )
            )
            return GatedMlp(gate, up, down)
        bias, shape = bool_value(self._config, "mlp_bias"), (2 * inner, self._hidden)
        gate, up = (
            self._reader.shared(
                f"{name}.gate_up_proj", shape, bias, rows=rows, alias=f"{name}.{part}_proj"
            )
            for part, rows in (("gate", slice(inner)), ("up", slice(inner, None)))
        )
        adapter = f"{name}.gate_up_proj_adapter_list"
        self._add_update(gate, adapter, shape, slice(inner))
        self._add_update(up, adapter, shape, slice(inner, None))
        down = self._reader.shared(f"{name}.down_proj", (self._hidden, inner), bias)
        return GatedMlp(gate, up, down)

    def _add_update(
        self, linear: Linear, name: str, shape: tuple[int, int], rows: slice = slice(None)
    ) -> None:
        """Add the layer's own update, after that of an adapter if there is one."""
        full = f"{name}.{self._place}"
        down = self._reader.tensor(f"{full}.0.weight", (self._rank, shape[1]))
        up = self._reader.tensor(f"{full}.1.weight", (shape[0], self._rank))[rows]
        if linear.update is not None:
            first_down, first_up = linear.update
            down = np.concatenate([first_down.data, down])
            up = np.concatenate([first_up.data, up], axis=1)
        name = f"{linear.weight.name}.{self._place}"
        linear.update = update_weights(down, up, name)

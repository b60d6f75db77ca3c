"""Tensors of layers that a GGUF file has in another form than a repository: split, with rows in
another order, or multiplied by factors of the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.families.recurrent import interleaved_rows, multiplier, multipliers
from anydecode.models.families.values import Config
from anydecode.models.loading.gguf import SEPARATE_CONVS
from anydecode.models.loading.gguf_names import UNUSED_IN_FIRST, layer_names
from anydecode.models.loading.lazy import Reader
from anydecode.models.spec import LayerSpec

#: The tensors in a file, from the layer, the config, and one in a repository: its usual name in the
#: layer, and its reader.
Rule = Callable[[LayerSpec, Config, str, Reader], dict[str, Reader]]

#: The parts of a gated delta layer with one number or row per value head.
_PER_HEAD = ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")

#: The norms of a layer of Falcon.
_NORMS = ("norm", "norm_2")


def rows_of(reader: Reader, order: np.ndarray | slice) -> np.ndarray | Weight:
    """Some rows of a tensor. Those of packed weights stay packed."""
    tensor = reader()
    if not isinstance(tensor, Weight):
        return tensor[order]
    data = tensor.data[order]
    return replace(tensor, data=data, out_features=len(data))


def columns_of(reader: Reader, order: np.ndarray) -> np.ndarray:
    """Some columns of a matrix. Packed weights become their values."""
    tensor = reader()
    return (dequantize(tensor) if isinstance(tensor, Weight) else tensor)[:, order]


def _separate_inputs(
    layer: LayerSpec, config: Config, name: str, reader: Reader
) -> dict[str, Reader]:
    """Qwen3-Next: the inputs and the gates of the recurrence are two matrices."""
    if name != "linear_attn.in_proj_qkvz.weight" or layer.recurrence is None:
        return {name: reader}
    *inputs, gates = interleaved_rows(layer.recurrence.shape)
    return {
        "linear_attn.in_proj_qkv.weight": partial(rows_of, reader, np.concatenate(inputs)),
        "linear_attn.in_proj_z.weight": partial(rows_of, reader, gates),
    }


def _tiled_heads(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """Qwen3.5: value heads are in the order in which ggml repeats key heads."""
    module, _, part = name.partition(".")
    if layer.recurrence is None or module != "linear_attn" or part == "norm.weight":
        return {name: reader}
    shape = layer.recurrence.shape
    size = 1 if part in _PER_HEAD else shape.head_dim
    values = np.arange(shape.num_heads * size).reshape(shape.num_groups, -1, size)
    order = values.swapaxes(0, 1).ravel()
    if part == "out_proj.weight":
        return {name: partial(columns_of, reader, order)}
    # Queries and keys are in front of the values.
    first = shape.width - len(order) if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    rows = np.concatenate([np.arange(first), first + order])
    return {name: partial(rows_of, reader, rows)}


def _by_head(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """Latent attention: the keys and the values of heads are two stacks of matrices."""
    if name != "self_attn.kv_b_proj.weight" or layer.latent is None:
        return {name: reader}
    return {
        f"self_attn.{part}_b_proj.weight": partial(_heads, reader, layer, part) for part in "kv"
    }


def _heads(reader: Reader, layer: LayerSpec, part: str) -> np.ndarray:
    """The matrices of keys `[heads, latent_dim, key_dim]`, or of values `[heads, value_dim,
    latent_dim]`."""
    assert layer.attention is not None and layer.latent is not None
    tensor, size = reader(), layer.latent.key_dim
    matrix = dequantize(tensor) if isinstance(tensor, Weight) else tensor
    heads = matrix.reshape(layer.attention.num_heads, -1, matrix.shape[1])
    stack = heads[:, :size].swapaxes(1, 2) if part == "k" else heads[:, size:]
    return np.ascontiguousarray(stack)


def _kimi_linear(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """Kimi Linear: MLPs have the name of experts, and `transformers` has modules of the decay."""
    name = name.replace("block_sparse_moe.", "mlp.").replace(".forget_gate.", ".")
    return _by_head(layer, config, name, reader)


def _granite_mlp(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """Granite 4: the gate and the input of the MLP are two matrices."""
    module = "mlp.shared_mlp" if layer.num_experts else "mlp"
    if name == "mlp.down_proj.weight":
        return {f"{module}.down_proj.weight": reader}
    if name != "mlp.gate_up_proj.weight":
        return {name: reader}
    size = config["intermediate_size"]
    parts = {"gate": slice(0, size), "up": slice(size, None)}
    return {f"{module}.{x}_proj.weight": partial(rows_of, reader, parts[x]) for x in parts}


def times(reader: Reader, factors: np.ndarray | float) -> np.ndarray:
    """A tensor multiplied by a factor, or each row by its own."""
    tensor = reader()
    values = dequantize(tensor) if isinstance(tensor, Weight) else tensor.astype(np.float32)
    if isinstance(factors, np.ndarray) and values.ndim == 2:
        factors = factors[:, None]
    product: np.ndarray = values * np.float32(factors)
    return product


def _falcon_h1(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """Falcon-H1: the factors of products are in their weights. Those of the inputs are not in the
    biases."""
    module, _, leaf = name.rpartition(".")
    own, is_weight = module.rpartition(".")[2], leaf == "weight"
    gate, down = multipliers(config, "mlp_multipliers", 2)
    before = multiplier(config, "attention_in_multiplier") if is_weight else 1.0
    factors = {
        "self_attn.q_proj": before,
        "self_attn.k_proj": before * multiplier(config, "key_multiplier"),
        "self_attn.v_proj": before,
        "self_attn.o_proj": multiplier(config, "attention_out_multiplier"),
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
        "mamba.out_proj": multiplier(config, "ssm_out_multiplier"),
    }
    factor: np.ndarray | float = factors.get(module, 1.0)
    if module == "mamba.in_proj" and layer.recurrence is not None:
        shape = layer.recurrence.shape
        keys = shape.num_groups * shape.state_size
        sizes = [shape.width_out, shape.width_out, keys, keys, shape.num_heads]
        parts = np.array(multipliers(config, "ssm_multipliers", 5), np.float32)
        first = multiplier(config, "ssm_in_multiplier") if is_weight else 1.0
        factor = np.repeat(parts * np.float32(first), sizes)
    return {name: partial(times, reader, factor) if own.endswith("_proj") else reader}


def _flat_bonus(layer: LayerSpec, config: Config, name: str, reader: Reader) -> dict[str, Reader]:
    """RWKV-7: the bonuses of all heads are one vector."""
    return {name: partial(_ravelled, reader) if name == "attn.r_k" else reader}


def _ravelled(reader: Reader) -> np.ndarray:
    return np.asarray(reader()).ravel()


#: What an architecture has in another form.
RULES: dict[str, Rule] = {
    "qwen3next": _separate_inputs,
    **dict.fromkeys(("qwen35", "qwen35moe"), _tiled_heads),
    "deepseek2": _by_head,
    "kimi-linear": _kimi_linear,
    "granitehybrid": _granite_mlp,
    "falcon-h1": _falcon_h1,
    "rwkv7": _flat_bonus,
}
#: The factors of tensors outside the layers, as keys of the config.
OUTER_FACTORS = {
    "falcon-h1": {"token_embd": "embedding_multiplier", "output": "lm_head_multiplier"},
}
#: The keys of a config that become others where this is applied.
CHANGED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen35", "qwen35moe"), {"has_tiled_keys": True}),
    "falcon-h1": dict.fromkeys(
        (
            *("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
            *("attention_in_multiplier", "attention_out_multiplier"),
            *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers"),
        )
    ),
}


def rearranged(
    architecture: str, layer: LayerSpec, config: Config, name: str, reader: Reader
) -> dict[str, Reader]:
    """The tensors of a file that a tensor of a repository becomes.

    Args:
        architecture: The architecture of the file.
        layer: The layer of the tensor.
        config: The config of the model, as `text_config` returns it.
        name: The tensor's usual name in its layer.
        reader: Reads it.

    Returns:
        Readers by usual names.
    """
    rule = RULES.get(architecture)
    return {name: reader} if rule is None else rule(layer, config, name, reader)


def shaped(layer: LayerSpec, target: str, values: np.ndarray) -> np.ndarray:
    """A tensor of a layer that is no matrix of a product, in its shape in files.

    Args:
        layer: The layer.
        target: The tensor's name in the file.
        values: The tensor.
    """
    if target.split(".")[-2] in SEPARATE_CONVS:
        return values.reshape(1, len(values), 1, -1)
    rule = None if layer.recurrence is None else layer.recurrence.shape.rule
    if rule == "kda" and target.endswith(".ssm_a"):
        return values.reshape(-1, 1)
    if len(values) == 1:  # a gate
        return values.ravel()
    if target.endswith("time_mix_lerp_fused.weight"):
        return values.reshape(len(values), 1, 1, -1)
    if "conv" in target and values.ndim == 3:  # that of each channel is of its own
        return values.reshape(len(values), -1)
    if layer.recurrence is not None and rule == "ssd":
        if target.endswith((".ssm_a", ".ssm_d")):
            return values[:, None]
        if target.endswith(".ssm_norm.weight"):
            return values.reshape(layer.recurrence.shape.num_groups, -1)
    return values


def joined(architecture: str, block: str, readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors of a block, of which files of `architecture` may have several as one.

    Args:
        architecture: The architecture of the file.
        block: The beginning of the names of its tensors.
        readers: The readers of the tensors by name.
    """
    found = dict(readers)
    if layer_names(architecture).get("attn_qkv") == "self_attn.qkv_proj":
        for leaf in ("weight", "bias"):
            names = [f"{block}attn_{part}.{leaf}" for part in "qkv"]
            if all(name in found for name in names):
                parts = [found.pop(name) for name in names]
                found[f"{block}attn_qkv.{leaf}"] = partial(below, parts)
    if block == "blk.0.":  # whose values are not mixed: another product fills the place
        for target in UNUSED_IN_FIRST.get(architecture, ()):
            other = target.replace("time_mix_v", "time_mix_a")
            found[f"{block}{target}.weight"] = found[f"{block}{other}.weight"]
    if architecture == "falcon":
        leaves = [x for x in ("weight", "bias") if f"{block}attn_norm.{x}" in found]
        pairs = [[found[f"{block}attn_{x}.{leaf}"] for x in _NORMS] for leaf in leaves]
        if all(np.array_equal(np.asarray(x()), np.asarray(y())) for x, y in pairs):
            for leaf in leaves:  # the norm is that of both sublayers
                del found[f"{block}attn_norm_2.{leaf}"]
    return found


def below(readers: list[Reader]) -> np.ndarray | Weight:
    """Tensors one below the other. They stay packed if all have one format."""
    parts = [reader() for reader in readers]
    first = parts[0]
    if isinstance(first, Weight):
        same = [x for x in parts if isinstance(x, Weight) and x.format == first.format]
        if len(same) == len(parts):
            data = np.concatenate([one.data for one in same])
            return replace(first, data=data, out_features=len(data))
    values = [dequantize(part) if isinstance(part, Weight) else part for part in parts]
    return np.concatenate(values)


def stacked(readers: list[Reader]) -> np.ndarray:
    """Matrices as one tensor `[matrices, rows, columns]`."""
    parts = [reader() for reader in readers]
    return np.stack([dequantize(part) if isinstance(part, Weight) else part for part in parts])

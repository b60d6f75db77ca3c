"""LoRA adapters in the layout of PEFT: `adapter_config.json` beside `adapter_model.safetensors`.

LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. Scaling by alpha / sqrt(rank): Kalajdzievski
2023, https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize, plain_weight
from anydecode.kernels.interface import Adapter, LowRank, Weight
from anydecode.models.files import read_json, untrusted
from anydecode.models.limits import number, refusal
from anydecode.models.linear import Linear, update_weights
from anydecode.models.network import LatentWeights, Network
from anydecode.models.spec import LatentSpec

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

# Options that change the computation, and their supported values; other values are not plain LoRA.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}


def load_adapter(path: Path, network: Network) -> Adapter:
    """Load the adapter in the folder `path` for `network`.

    Raises:
        CheckpointError: Files are missing or corrupt, the adapter is not plain LoRA, or it does not
            fit the model.
    """
    _, factors = read_factors(path)
    return fit_factors(path, factors, network)


def fit_factors(path: Path, factors: Mapping[str, Factors], network: Network) -> Adapter:
    """The adapter of `network` with these factors by module, which come from `path`.

    Raises:
        CheckpointError: They do not fit the model.
    """
    targets, orders = _weights(network), row_orders(network)
    deltas: dict[str, LowRank] = {}
    latent = _latent_layers(network)
    for name, module in factors.items():
        if name in latent:
            deltas |= _latent_updates(path, name, module, *latent[name])
            continue
        for target, rows in _targets(path, name, targets, len(module.up)):
            up = module.up[rows]
            if target.name in orders and len(up) == target.out_features:
                up = up[orders[target.name]]
            deltas[target.name] = _make_low_rank(path, target, module.down, up, module.scale)
    return deltas


def set_adapter(path: Path, factors: Mapping[str, Factors], network: Network) -> None:
    """Let a network that no executor runs yet compute an adapter beside its matrices, in all
    passes.

    Raises:
        CheckpointError: The factors, which come from `path`, do not fit the model, or are those of
            routed experts.
    """
    adapter = dict(fit_factors(path, factors, network))
    for layer in network.weights.layers:
        for linear in layer_linears(layer):
            delta = adapter.pop(linear.weight.name, None)
            if delta is None:
                continue
            parts = [(dequantize(delta.down), dequantize(delta.up) * np.float32(delta.scale))]
            if linear.update is not None:
                down, up = linear.update
                parts.insert(0, (dequantize(down), dequantize(up)))
            downs, ups = zip(*parts, strict=True)
            linear.update = update_weights(
                np.concatenate(downs), np.concatenate(ups, 1), linear.weight.name
            )
    if adapter:
        raise CheckpointError(f"{path}: {min(adapter)} cannot have an adapter that is always on")


def layer_linears(value: Any) -> Iterator[Linear]:
    """Yield the matrices of a layer that have their own product, those of routed experts left
    out."""
    if isinstance(value, Linear):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from layer_linears(getattr(value, one.name))


@dataclass(frozen=True)
class Factors:
    """The low-rank update of one matrix: `scale` times `up[out, rank] @ down[rank, in]`."""

    down: np.ndarray
    up: np.ndarray
    scale: float


def read_factors(path: Path) -> tuple[dict[str, Any], dict[str, Factors]]:
    """Read the adapter in the folder `path`.

    Returns:
        Its config, and its float32 factors by module.

    Raises:
        CheckpointError: Files are missing or corrupt, or the adapter is not plain LoRA.
    """
    with untrusted(path, config="adapter_config.json"):
        return _read_factors(path)


def _read_factors(path: Path) -> tuple[dict[str, Any], dict[str, Factors]]:
    config, tensors = _read(path)
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise CheckpointError(f"{path}: adapters of type {config['peft_type']} are not supported")
    for key, allowed in _SUPPORTED.items():
        if config.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key}={config[key]!r} is not supported")
    factors = {}
    for name in sorted(_modules(path, tensors)):
        down = tensors[f"{name}.lora_A.weight"].astype(np.float32)
        up = tensors[f"{name}.lora_B.weight"].astype(np.float32)
        if down.ndim != 2 or up.ndim != 2 or not len(down) or up.shape[1] != len(down):
            raise CheckpointError(
                f"{path}: {name} has factors of shape {down.shape} and {up.shape};"
                " allowed are [rank, in] and [out, rank]"
            )
        factors[_strip_prefix(name)] = Factors(down, up, _scale(path, config, name, down.shape[0]))
    return config, factors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
    try:
        tensors = load_file(path / names[1])
    except (ValueError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: the adapter cannot be read ({error})") from None
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise CheckpointError(f"{path}: the adapter has numbers that are not finite")
    return read_json(path / names[0]), tensors


def _modules(path: Path, tensors: Mapping[str, np.ndarray]) -> set[str]:
    """The modules that have both factors. Raises CheckpointError for any other tensor."""
    modules = set()
    for name in tensors:
        module, _, rest = name.rpartition(".lora_")
        other = {"A.weight": "B.weight", "B.weight": "A.weight"}.get(rest)
        if other is None:
            raise CheckpointError(f"{path}: tensor {name} is not part of a LoRA adapter")
        if f"{module}.lora_{other}" not in tensors:
            raise CheckpointError(f"{path}: tensor {module}.lora_{other} is missing")
        modules.add(module)
    if not modules:
        raise CheckpointError(f"{path}: the adapter is empty")
    return modules


def _strip_prefix(module: str) -> str:
    return module.removeprefix("base_model.model.")


def _scale(path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank); ranks and alphas may be set per module."""
    configured = _module_value(config, "rank_pattern", module, config.get("r"))
    if configured is not None and configured != rank:
        raise CheckpointError(
            f"{path}: {module} has rank {rank}, but its config has {configured!r}"
        )
    alpha = number(
        "lora_alpha", _module_value(config, "alpha_pattern", module, _alpha(config, rank))
    )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _alpha(config: Mapping[str, Any], rank: int) -> Any:
    value = config.get("lora_alpha")
    return rank if value is None else value


def _module_value(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """The value whose key equals the module's name or a suffix of it, as in PEFT."""
    patterns = config.get(name)
    if patterns is not None and not isinstance(patterns, dict):
        raise refusal(name, patterns, "an object")
    for key, value in (patterns or {}).items():
        if _strip_prefix(module) == key or module.endswith(f".{key}"):
            return value
    return default


def _weights(network: Network) -> dict[str, Weight]:
    """The weights that an adapter can target, by name."""
    weights: list[Weight] = []
    if network.weights.per_layer is not None:
        weights.append(network.weights.per_layer.projection.weight)
    for layer in network.weights.layers:
        weights += layer.matrices
    return {weight.name: weight for weight in weights}


def row_orders(network: Network) -> dict[str, np.ndarray]:
    """The order of rows of the weights whose rows were reordered when they were loaded."""
    orders = {}
    for spec, layer in zip(network.spec.layers, network.weights.layers, strict=True):
        parts = (
            (layer.query, spec.query_order()),
            (layer.key, spec.key_order()),
            (layer.value, spec.value_order()),
        )
        for linear, order in parts:
            if order is not None and linear is not None:
                orders[linear.weight.name] = order
    return orders


def _latent_layers(network: Network) -> dict[str, tuple[LatentSpec, LatentWeights]]:
    """The layers with latent attention, by the name of the matrix that is split by head."""
    layers = zip(network.spec.layers, network.weights.layers, strict=True)
    return {
        f"model.layers.{index}.self_attn.kv_b_proj": (spec.latent, layer.latent)
        for index, (spec, layer) in enumerate(layers)
        if spec.latent is not None and layer.latent is not None
    }


def _latent_updates(
    path: Path, name: str, module: Factors, spec: LatentSpec, weights: LatentWeights
) -> dict[str, LowRank]:
    """The updates of each head's matrices of keys, which are transposed, and values."""
    heads = len(weights.keys)
    size = heads * (spec.key_dim + spec.value_dim)
    if len(module.up) != size:
        raise CheckpointError(f"{path}: {name} has {len(module.up)} outputs, the model {size}")
    updates = {}
    for head, up in enumerate(np.split(module.up, heads)):
        key, value = up[: spec.key_dim], up[spec.key_dim :]
        for target, down, part in (
            (weights.keys[head], key.T, module.down.T),
            (weights.values[head], module.down, value),
        ):
            down = np.ascontiguousarray(down)
            updates[target.name] = _make_low_rank(path, target, down, part, module.scale)
    return updates


def _targets(
    path: Path, name: str, weights: Mapping[str, Weight], out_features: int
) -> list[tuple[Weight, slice]]:
    """The weights that a module covers, each with its rows; a fused module covers several."""
    if name in weights:
        return [(weights[name], slice(0, out_features))]
    stem, _, last = name.rpartition(".")
    parts = [weights.get(f"{stem}.{part}") for part in _FUSED.get(last, ())]
    if not parts or any(part is None for part in parts):
        raise CheckpointError(f"{path}: the model has no module {name} that an adapter can target")
    covered, start = [], 0
    for part in parts:
        assert part is not None
        covered.append((part, slice(start, start + part.out_features)))
        start += part.out_features
    if start != out_features:
        raise CheckpointError(f"{path}: {name} has {out_features} outputs, the model {start}")
    return covered


def _make_low_rank(
    path: Path, target: Weight, down: np.ndarray, up: np.ndarray, scale: float
) -> LowRank:
    if down.shape[1] != target.in_features or up.shape[0] != target.out_features:
        raise CheckpointError(
            f"{path}: factors {down.shape} and {up.shape} do not fit {target.name},"
            f" which is {target.out_features} by {target.in_features}"
        )
    return LowRank(plain_weight(down), plain_weight(np.ascontiguousarray(up)), scale)

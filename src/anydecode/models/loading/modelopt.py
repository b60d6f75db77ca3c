"""Reads the formats of ModelOpt: FP8 with a scale per tensor, output or block, and NVFP4. Which one
a module has, its tensors say. The scales of activations and the cache are not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading import nvfp4
from anydecode.models.loading.compressed_tensors import scaled_blocks
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, scaled_weight

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"
_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_BLOCK = 128  # outputs and inputs that share a scale in FP8_PB_WO


def layouts(settings: Mapping[str, Any], path: object) -> list[Layout]:
    """The only layout, whose formats are told apart by their tensors.

    Raises:
        CheckpointError: The settings name a format that is not supported.
    """
    algorithms = [settings.get("quant_algo")]
    if algorithms == [_MIXED]:
        layers = settings.get("quantized_layers") or {}
        algorithms = [layer.get("quant_algo") for layer in layers.values()]
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"{path}: ModelOpt with quant_algo {algorithm!r} is not supported; supported are"
                f" {', '.join(ALGORITHMS)} and {_MIXED} of these"
            )
    return [Layout("weight_scale", _PARTS, _read)]


def _read(
    get: Callable[[str], np.ndarray], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    if has(f"{module}.pre_quant_scale"):
        raise CheckpointError(
            f"the inputs of {module!r} have a pre_quant_scale, which is not supported; supported"
            " are weights that need no scales of inputs"
        )
    if has(f"{module}.weight_scale_2"):
        return nvfp4.read(get, module, "weight", "weight_scale_2")
    numbers, scales = get(f"{module}.weight"), get(f"{module}.weight_scale")
    if numbers.ndim != 2 or numbers.dtype.name != "float8_e4m3fn":
        raise misfit(module, numbers, scales)
    if scales.ndim == 4:  # [blocks of outputs, 1, blocks of inputs, 1]
        scales = scales.reshape(scales.shape[0], -1)
    blocks = tuple(-(-size // _BLOCK) for size in numbers.shape)
    if scales.ndim == 2 and scales.shape == blocks and scales.size > 1:
        return scaled_blocks(numbers, scales, (_BLOCK, _BLOCK), module)
    groups = np.zeros(numbers.shape[1], np.int64)
    return scaled_weight(numbers, scales.reshape(-1, 1), groups, module)

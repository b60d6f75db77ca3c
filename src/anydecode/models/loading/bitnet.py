"""Reads weights of BitNet b1.58 (Ma et al., 2024, arXiv:2402.17764) in the layout of transformers:
four codes per byte with a scale, or the numbers that they are rounded from ("online").

Activations are not rounded to eight bits per row, as the published code does it: the kernels round
them in blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit
from anydecode.models.loading.ternary import ternary_weight

#: Class of the layers -> whether outputs are multiplied by the stored scale, not divided by it.
_CLASSES = {"bitlinear": False, "autobitlinear": True}
_MODES = ("offline", "online")

Get = Callable[[str], np.ndarray]


def layouts(settings: Mapping[str, Any], path: object) -> list[Layout]:
    """The only layout. Raises `CheckpointError` for settings that are not supported."""
    kind, mode = settings.get("linear_class", "bitlinear"), settings.get("quantization_mode")
    mode = mode or "offline"
    if kind not in _CLASSES or mode not in _MODES or settings.get("use_rms_norm"):
        raise CheckpointError(
            f"{path}: BitNet with linear_class {kind!r}, quantization_mode {mode!r} and"
            f" use_rms_norm {settings.get('use_rms_norm', False)} is not supported; supported are"
            f" {' and '.join(_CLASSES)}, {' and '.join(_MODES)}, and no norms"
        )
    if mode == "online":
        return [Layout("weight", ("weight",), _round)]
    read = partial(_read, is_factor=_CLASSES[kind])
    return [Layout("weight_scale", ("weight", "weight_scale"), read)]


def _read(
    get: Get, has: Callable[[str], bool], module: str, settings: Any, is_factor: bool
) -> Weight:
    packed, scale = get(f"{module}.weight"), get(f"{module}.weight_scale").astype(np.float32)
    if packed.ndim != 2 or packed.dtype != np.uint8 or scale.size != 1 or not scale.item():
        raise misfit(module, packed, scale)
    # Byte i of a column has the rows i, i + n, i + 2 n and i + 3 n of 4 n rows.
    codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])
    if codes.max() > 2:
        raise CheckpointError(f"{module!r} has codes that are not those of -1, 0 and 1")
    factor = scale.item() if is_factor else 1.0 / scale.item()
    return ternary_weight(codes, factor, module)


def _round(get: Get, has: Callable[[str], bool], module: str, settings: Any) -> Weight | np.ndarray:
    """The matrix of a projection, rounded to multiples of its mean magnitude; other tensors as they
    are."""
    tensor = get(f"{module}.weight")
    if tensor.ndim != 2 or not module.endswith("_proj"):
        return tensor
    numbers = tensor.astype(np.float32)
    factor = max(np.abs(numbers).mean(), np.float32(1e-5))
    codes = (np.rint(numbers / factor).clip(-1, 1) + 1).astype(np.uint8)
    return ternary_weight(codes, float(factor.astype(tensor.dtype)), module)

"""Finds how a folder's weights are quantised, and reads the parts of each module as one weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.files import read_json
from anydecode.models.loading import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    modelopt,
    torchao,
)
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.lazy import MissingTensorError, Reader


def _only(module: ModuleType) -> Callable[[Mapping[str, Any], Path], list[Layout]]:
    """The layouts of a method with one, after a check of its settings."""

    def layouts(settings: Mapping[str, Any], path: Path) -> list[Layout]:
        module.check(settings, path)
        return [Layout(module.MARKER, module.PARTS, module.read)]

    return layouts


_METHODS: dict[str, Callable[[Mapping[str, Any], Path], list[Layout]]] = {
    "gptq": _only(gptq),
    "awq": _only(awq),
    "fp8": _only(fp8),
    "modelopt": modelopt.layouts,
    "compressed-tensors": compressed_tensors.layouts,
    "bitsandbytes": bitsandbytes.layouts,
    "hqq": hqq.layouts,
    "torchao": torchao.layouts,
}


def settings_of(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The settings of the quantisation of the folder `path`, from its files; None: none.

    ModelOpt writes them to a file of its own. hqq itself writes none, and stores everything with
    each module.
    """
    settings = config.get("quantization_config")
    if settings:
        return settings
    settings = read_json(path / "hf_quant_config.json").get("quantization")
    if isinstance(settings, dict) and settings.get("quant_algo") is not None:
        return {**settings, "quant_method": "modelopt"}
    if any(name.endswith(f".{hqq.MARKER}") for name in names):
        return {"quant_method": "hqq"}
    return None


def dequantizing_readers(
    path: Path, readers: dict[str, Reader], settings: Any
) -> dict[str, Reader]:
    """Readers that return the parts of each quantised module as one weight.

    Raises:
        CheckpointError: The method or its settings are not supported.
    """
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == "mxfp4":  # a format of the kernels, which `families/experts.py` reads
        return readers
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{path}: weights quantised with {method!r} are not supported; supported are"
            f" {', '.join(_METHODS)} and mxfp4"
        )
    result = dict(readers)
    get = partial(_read_plain, path, readers)
    for layout in _METHODS[method](settings, path):
        end = f".{layout.marker}"
        for module in sorted(name.removesuffix(end) for name in readers if name.endswith(end)):
            for part in layout.parts:
                result.pop(f"{module}.{part}", None)
            read = partial(layout.read, get, readers.__contains__, module, settings)
            result[f"{module}.weight"] = read
    return result


def _read_plain(path: Path, readers: dict[str, Reader], name: str) -> np.ndarray:
    if name not in readers:
        raise MissingTensorError(f"{path}: the checkpoint has no tensor {name!r}")
    tensor = readers[name]()
    assert isinstance(tensor, np.ndarray), "safetensors hold plain tensors"
    return tensor

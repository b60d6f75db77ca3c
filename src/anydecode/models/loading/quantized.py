"""Finds how a folder's weights are quantised, and reads the parts of each module as one weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.families.advice import quantization_advice
from anydecode.models.families.values import int_value
from anydecode.models.files import read_json
from anydecode.models.loading import (
    awq,
    bitnet,
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


def _auto_round(settings: Mapping[str, Any], path: Path) -> list[Layout]:
    """AutoRound (Cheng et al., 2023, arXiv:2309.05516) packs as GPTQ or AWQ do."""
    packing = settings.get("packing_format")
    packings = {"auto_round:auto_gptq": gptq, "auto_round:auto_awq": awq}
    if packing not in packings:
        raise CheckpointError(
            f"{path}: AutoRound with packing_format {packing!r} is not supported; supported are"
            f" {' and '.join(packings)}"
        )
    return _only(packings[packing])(settings, path)


_METHODS: dict[str, Callable[[Mapping[str, Any], Path], list[Layout]]] = {
    "gptq": _only(gptq),
    "awq": _only(awq),
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "fp8": fp8.layouts,
    "fbgemm_fp8": fp8.layouts,
    "modelopt": modelopt.layouts,
    "compressed-tensors": compressed_tensors.layouts,
    "bitsandbytes": bitsandbytes.layouts,
    "hqq": hqq.layouts,
    "torchao": torchao.layouts,
    "bitnet": bitnet.layouts,
}


#: Method -> the file of its settings, where these are not in config.json.
_OWN_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}


def settings_of(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The settings of the quantisation of the folder `path`, from its files; None: none.

    Where queries, keys and values are stored in shards (MiMo-V2.5), their number is one of them.
    Some multimodal models (Kimi K2.5) have them in their `text_config`, early versions of
    compressed-tensors under another key, ModelOpt and early versions of AutoGPTQ and AutoAWQ in a
    file of their own. hqq itself writes none, and stores everything with each module.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        settings = part.get("quantization_config") or part.get("compression_config")
        if settings and part.get("attention_projection_layout") == "fused_qkv":
            return {**settings, "qkv_shards": int_value(part, "num_key_value_heads")}
        if settings:
            return settings
    if any(name.endswith(f".{gptq.MARKER}") for name in names):
        for method, file in _OWN_FILES.items():
            settings = read_json(path / file)
            if settings:
                return {**settings, "quant_method": method}
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
            f" {', '.join(_METHODS)} and mxfp4{quantization_advice(method)}"
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

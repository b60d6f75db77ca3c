"""A folder in the Hugging Face layout: config.json, safetensors files, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import check_multimodal
from anydecode.models.loading import awq, bd3lm, gptq, llada, sdar
from anydecode.models.loading.lazy import LazyTensors, MissingTensorError, Reader
from anydecode.models.tokenizers import HFTokenizer, read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Where multimodal checkpoints keep their language model, and what its names begin with alone.
_NESTED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def load_folder(path: Path) -> Checkpoint:
    """Open the checkpoint in `path`. Tensors are mapped and read when asked for.

    Raises `CheckpointError`, in one line, where a file is missing, truncated, corrupt or pickled.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: there is no config.json")
    config = read_json(path / "config.json")
    readers: dict[str, Reader] = {}
    for file in _files(path):
        for name, reader in _open(file).items():
            readers[name] = reader
    settings = config.get("quantization_config")
    if isinstance(config.get("text_config"), dict):
        check_multimodal(config)
        config, readers = _text_part(config, readers)
    if llada.is_llada(config):
        config, readers = llada.standard(config, readers)
    if bd3lm.is_bd3lm(config):
        config, readers = bd3lm.standard(config, readers)
    config = sdar.with_block_size(config, path)
    if settings:
        readers = _unpacking(path, readers, settings)
    return Checkpoint(
        name=path.name,
        path=path,
        config=config,
        tensors=LazyTensors(path, readers),
        tokenizer=HFTokenizer.from_folder(path),
        generation_config=read_json(path / "generation_config.json"),
    )


def _files(path: Path) -> list[Path]:
    """The safetensors files of the checkpoint, all of them present."""
    index = read_json(path / _INDEX)
    if index:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            raise CheckpointError(f"{path / _INDEX}: holds no weight_map")
        files = [path / name for name in sorted(set(shards.values()))]
        for file in files:
            if file.parent != path or file.suffix != ".safetensors":
                raise CheckpointError(f"{path / _INDEX}: names the unsafe file {str(file)!r}")
            if not file.is_file():
                raise CheckpointError(f"{path}: the shard {file.name} is missing")
        return files
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    if any(file.suffix in _PICKLED for file in path.iterdir()):
        raise CheckpointError(
            f"{path}: holds pickled weights only, which can run code when opened; "
            "use a checkpoint with safetensors"
        )
    raise CheckpointError(f"{path}: there are no safetensors files")


def _open(file: Path) -> dict[str, Reader]:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
        names: list[str] = list(handle.keys())  # type: ignore[no-untyped-call,unused-ignore]
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: truncated or corrupt safetensors: {reason}") from None
    return {name: partial(_tensor, file, handle, name) for name in names}


def _tensor(file: Path, handle: Any, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = handle.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {reason}") from None
    return tensor


def _text_part(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """The language model alone of a checkpoint that also has other parts."""
    text = {**config["text_config"]}
    for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config:
            text.setdefault(key, config[key])
    kept: dict[str, Reader] = {}
    for name, reader in readers.items():
        start = next((prefix for prefix in _NESTED if name.startswith(prefix)), None)
        if start is not None:
            kept[_NESTED[start] + name[len(start) :]] = reader
        elif name.startswith("lm_head."):
            kept[name] = reader
    return text, kept or readers


def _unpacking(path: Path, readers: dict[str, Reader], settings: Any) -> dict[str, Reader]:
    """Readers that give each quantised module's parts as one weight."""
    methods: dict[str, ModuleType] = {"gptq": gptq, "awq": awq}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in methods:
        raise CheckpointError(
            f"{path}: weights quantised with {method!r} are not supported; gptq and awq are"
        )
    layout = methods[method]
    layout.check(settings, path)
    modules = sorted(name[: -len(".qweight")] for name in readers if name.endswith(".qweight"))
    parts = {f"{module}.{part}" for module in modules for part in layout.PARTS}
    kept = {name: reader for name, reader in readers.items() if name not in parts}
    get = partial(_plain, path, readers)
    for module in modules:
        read = partial(layout.read, get, readers.__contains__, module, settings)
        kept[f"{module}.weight"] = partial(_named, path, module, read)
    return kept


def _plain(path: Path, readers: dict[str, Reader], name: str) -> torch.Tensor:
    if name not in readers:
        raise MissingTensorError(f"{path}: the checkpoint has no tensor {name!r}")
    tensor = readers[name]()
    assert isinstance(tensor, torch.Tensor), "safetensors hold plain tensors"
    return tensor


def _named(path: Path, module: str, read: Callable[[], Weight]) -> Weight:
    """One module's weight, with errors that name the checkpoint."""
    try:
        return read()
    except MissingTensorError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: {module!r} is corrupt: {reason}") from None

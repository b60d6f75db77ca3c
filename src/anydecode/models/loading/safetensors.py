"""Loads a folder in the Hugging Face layout: config.json, safetensors files, tokenizer."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn, float8_e8m0fnu
from safetensors import SafetensorError, safe_open

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import check_multimodal, text_config
from anydecode.models.families.nested import completed, with_text_config
from anydecode.models.files import folder_name, read_json
from anydecode.models.loading import (
    arwkv,
    bd3lm,
    deepseek,
    diffusion_gemma,
    dit,
    encoder,
    gpt,
    hrm_text,
    llada,
    mistral,
    molmo2,
    plamo,
    rwkv6,
    sdar,
)
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.loading.quantized import dequantizing_readers, settings_of
from anydecode.models.loading.torch_file import heads_file, open_torch_file
from anydecode.models.pooling import read_pooling, with_projection
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")
#: Names of the supported types in a header.
_DTYPES: dict[str, np.dtype[Any]] = {
    **DTYPES,
    **{
        name: np.dtype(code)
        for name, code in {
            "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
            "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
        }.items()
    },
    "F8_E4M3": np.dtype(float8_e4m3fn),
    "F8_E8M0": np.dtype(float8_e8m0fnu),
}  # fmt: skip
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Modules that are a whole language model in a multimodal checkpoint.
_PARTS = ("language_model", "thinker", "language", "llm")
#: Name prefixes of the language model in multimodal checkpoints -> prefixes in a checkpoint of its
#: own.
_NESTED = {
    # Kimi K2.5 and Qianfan-OCR as `transformers` 5.23 saves them: its renaming of the tower's
    # layers takes in those of the language model.
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.encoder.layers.": "model.layers.",
    **{f"{part}.{name}.": f"{name}." for part in _PARTS for name in ("model", "lm_head")},
    # InternLM 2 and Nemotron-H
    "language_model.output.": "output.",
    "language_model.backbone.": "backbone.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    # DiffusionGemma
    "model.decoder.": "model.",
    "model.encoder.language_model.": "model.context.",
    # EmbeddingGemma 2
    "language_model.": "model.",
}


def load_folder(path: Path) -> Checkpoint:
    """Open the checkpoint in `path`. Tensors are memory-mapped and read on access.

    Raises:
        CheckpointError: A file is missing, truncated, corrupt or pickled. The message is one line.
    """
    if not (path / "config.json").is_file():
        inside = sorted(file.parent.name for file in path.glob("*/config.json"))[:8]
        hint = f"; give a folder in it: {', '.join(inside)}" if inside else ""
        raise CheckpointError(f"{path}: there is no config.json, and no .gguf file{hint}")
    config = with_text_config(read_json(path / "config.json"))
    heads = heads_file(path)
    readers = _open_files(_files(path, config)) if heads is None else open_torch_file(heads)
    settings = settings_of(path, config, readers)
    if isinstance(config.get("text_config"), dict):
        check_multimodal(config)
        config, readers = _language_model(config, readers)
    if llada.is_llada(config):
        config, readers = llada.to_hf_layout(config, readers)
    if molmo2.is_molmo2(config, readers):
        readers = molmo2.to_hf_layout(config, readers)
    if plamo.is_plamo(config):
        readers = plamo.to_hf_layout(readers)
    if rwkv6.is_rwkv6(config):
        readers = rwkv6.to_hf_layout(readers)
    if arwkv.is_arwkv(config):
        readers = arwkv.to_hf_layout(readers)
    if hrm_text.is_hrm_text(config):
        readers = hrm_text.to_hf_layout(readers)
    if bd3lm.is_bd3lm(config):
        config, readers = bd3lm.to_hf_layout(config, readers)
    if dit.is_dit(config):
        config, readers = dit.to_hf_layout(config, readers)
    if gpt.is_gpt(config):
        if settings:  # the names of the parts of modules have no place in the usual layout
            readers, settings = dequantizing_readers(path, readers, settings), None
        config, readers = gpt.to_hf_layout(config, readers)
    if deepseek.is_deepseek_v4(config, readers):
        config, readers = deepseek.to_hf_layout(config, readers)
    if mistral.is_mistral_large4(config, readers):
        readers = mistral.to_hf_layout(readers)
    pooling = read_pooling(path, config)
    if pooling is not None:
        config = _with_head(config)
    if config.get("model_type") == "embedding_gemma2_text":
        name = next((x for x in readers if x.endswith("embedding_projection.weight")), None)
        if name is None:
            raise CheckpointError(f"{path}: the tensor embedding_projection.weight is missing")
        pooling = with_projection(pooling, np.asarray(readers[name]()), config.get("hidden_size"))
    if encoder.is_encoder(config):
        config, readers = encoder.to_hf_layout(config, readers)
    config = sdar.with_block_size(config, path)
    generation = read_json(path / "generation_config.json")
    config = diffusion_gemma.with_sampler(config, generation)
    if settings:
        readers = dequantizing_readers(path, readers, settings)
    return Checkpoint(
        name=folder_name(path),
        path=path,
        config=config,
        tensors=LazyTensors(path, readers),
        tokenizer=HFTokenizer.from_folder(path) or RwkvTokenizer.from_folder(path),
        generation_config=generation,
        pooling=pooling,
    )


def open_tensors(path: Path) -> LazyTensors:
    """All tensors of the safetensors files of a folder, by the names that they have there.

    Raises:
        CheckpointError: As in `load_folder`.
    """
    files = _files(path, {})  # its model, such as one of images, may be none that generates
    return LazyTensors(path, _open_files(files))


def _with_head(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an embedding model that was saved without a head, as if it had one."""
    names = config.get("architectures")
    if encoder.is_encoder(config) or not isinstance(names, list):
        return config
    full = [re.sub(r"Model$", "ForCausalLM", name) for name in names if isinstance(name, str)]
    return {**config, "architectures": full}


def _files(path: Path, config: dict[str, Any]) -> list[Path]:
    """The safetensors files of the checkpoint. Raises CheckpointError if one is missing; if all
    are, first for a model that is not supported, whose files would not help."""
    index = read_json(path / _INDEX)
    if index:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            raise CheckpointError(f"{path / _INDEX}: has no valid weight_map")
        files = [path / name for name in sorted(set(shards.values()))]
        for file in files:
            if file.parent != path or file.suffix != ".safetensors":
                raise CheckpointError(
                    f"{path / _INDEX}: unsafe file {str(file)!r}; allowed are safetensors files of"
                    " the same folder"
                )
            if not file.is_file():
                raise CheckpointError(f"{path}: the shard {file.name} is missing")
        return files
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if found:
        _check_shards(path, {file.name for file in found})
        return found
    if config.get("model_type") is not None and not (
        encoder.is_encoder(config) or dit.is_dit(config)
    ):
        text_config(config)
    if any(file.suffix in _PICKLED for file in path.iterdir()):
        raise CheckpointError(
            f"{path}: contains only pickled weights, which can run code when loaded; "
            "use a checkpoint with safetensors"
        )
    raise CheckpointError(f"{path}: there are no safetensors files")


def _check_shards(path: Path, names: set[str]) -> None:
    """Raise CheckpointError if a shard of NAME-00001-of-0000N.safetensors is missing."""
    for match in filter(None, map(_SHARD.fullmatch, sorted(names))):
        for number in range(1, int(match[2]) + 1):
            name = f"{match[1]}-{number:05d}-of-{match[2]}.safetensors"
            if name not in names:
                raise CheckpointError(f"{path}: the shard {name} is missing")


def _open_files(files: list[Path]) -> dict[str, Reader]:
    """A reader per tensor of all files. Raises CheckpointError if two contain the same tensor."""
    readers: dict[str, Reader] = {}
    sources: dict[str, Path] = {}
    for file in files:
        for name, reader in _open_file(file).items():
            if name in readers:
                raise CheckpointError(
                    f"{file.parent}: the tensor {name!r} is in both {sources[name].name} and"
                    f" {file.name}; each tensor must be in one file: remove the file that does not"
                    " belong to the checkpoint"
                )
            readers[name], sources[name] = reader, file
    return readers


def _open_file(file: Path) -> dict[str, Reader]:
    """A reader per tensor of a file, which is mapped. The library checks the header."""
    try:
        with safe_open(str(file), framework="numpy"):
            pass
        data = np.memmap(file, np.uint8, mode="c")
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: truncated or corrupt safetensors: {reason}") from None
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    return {name: partial(_tensor, file, data[start:], name, header[name]) for name in header}


def _tensor(file: Path, data: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    """A view of a tensor in the mapped file; `entry` is its entry in the header."""
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"{file}: tensor {name!r} has type {entry['dtype']}; supported are {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    return np.asarray(data[begin:end]).view(dtype).reshape(entry["shape"])


def _language_model(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors of the language model of a multimodal checkpoint."""
    text = {**config["text_config"]}
    for key in (
        "model_type",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "canvas_length",
    ):
        if key in config:
            text.setdefault(key, config[key])
    text = completed(text, text.get("model_type"))
    # The whole model's key counts; its text_config may have a default.
    if config.get("tie_word_embeddings") is False and any("lm_head." in name for name in readers):
        text["tie_word_embeddings"] = False
    if not any(name.startswith(tuple(_NESTED)) for name in readers):
        return text, readers
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        start = next((prefix for prefix in _NESTED if name.startswith(prefix)), None)
        if start is not None:
            result[_NESTED[start] + name[len(start) :]] = reader
        elif name.startswith(("lm_head.", "mtp.")):
            result[name] = reader
    return text, result

"""Loads a GGUF file as a `Checkpoint` with Hugging Face names; weights stay packed and mapped."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config, layer_config
from anydecode.models.hybrid_dna_tokenizer import HybridDnaTokenizer
from anydecode.models.loading import gguf_tasks
from anydecode.models.loading.gguf_config import config_from_gguf
from anydecode.models.loading.gguf_dflash import ARCHITECTURE as DFLASH
from anydecode.models.loading.gguf_dflash import load_dflash
from anydecode.models.loading.gguf_eagle3 import ARCHITECTURE as EAGLE3
from anydecode.models.loading.gguf_eagle3 import load_eagle3
from anydecode.models.loading.gguf_encoder import classifier_of, is_beside_network, pooling_of
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.gguf_keys import SAMPLING, TIME_MIXING, Keys
from anydecode.models.loading.gguf_names import (
    CONTEXT_SCALE,
    EXPERTS,
    FACTORS,
    FLAT,
    HEADS,
    IN_CONFIG,
    INTERLEAVED,
    NEXTN,
    NEXTN_MODULES,
    OF_GROUPS,
    OUTER_VECTORS,
    OWN_VECTORS,
    SCALES,
    STACKS,
    UNUSED_IN_FIRST,
    VECTORS,
    WITHOUT_NEXTN,
    has_one_added,
    is_own_vector,
    layer_names,
    outer_names,
)
from anydecode.models.loading.gguf_recurrent_shapes import time_mix_vectors
from anydecode.models.loading.gguf_rope import deinterleaved, half_order
from anydecode.models.loading.gguf_shapes import Shape, check_shapes
from anydecode.models.loading.gguf_xielu import xielu_tensors
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer

#: The convolutions of Kimi Linear, which are stored with two axes of size 1.
SEPARATE_CONVS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
#: The tokenizers that are no plain ones of the `tokenizers` library, by their names in files.
_TOKENIZERS: dict[str, type[HFTokenizer] | type[RwkvTokenizer]] = {
    "rwkv": RwkvTokenizer,
    "hybriddna": HybridDnaTokenizer,
}
#: What opens drafters, by architecture.
_DRAFTERS = {EAGLE3: load_eagle3, DFLASH: load_dflash}


def load_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        CheckpointError: The file is truncated, corrupt or unsupported. The message is one line.
    """
    file = GGUFFile(path)
    load_drafter = _DRAFTERS.get(str(file.metadata.get("general.architecture")))
    return open_gguf(file) if load_drafter is None else load_drafter(file)


def open_gguf(file: GGUFFile) -> Checkpoint:
    """The checkpoint of a file that holds a model, no drafter.

    Raises:
        CheckpointError: The file is corrupt or unsupported. The message is one line.
    """
    path = file.path
    config = config_from_gguf(file)
    spec_from_config(config)  # validated before lists of layers and experts are built
    architecture: str = file.metadata["general.architecture"]
    readers: dict[str, Reader] = {}
    shapes: dict[str, Shape] = {}
    for info in file.tensors.values():
        if info.name in IN_CONFIG or info.name.endswith(".attn_rot_embd"):
            continue
        if is_beside_network(info.name):
            continue
        for name, shape, reader in _convert(file, info, architecture, config):
            readers[name], shapes[name] = reader, shape
    if architecture == "apertus":
        for name, tensor in xielu_tensors(file, config["num_hidden_layers"]).items():
            readers[name], shapes[name] = partial(np.array, tensor), tensor.shape
    check_shapes(path, architecture, config, shapes)
    if architecture == gguf_tasks.ARCHITECTURE:
        readers |= gguf_tasks.read_task_files(
            path, config, lambda info: _convert(file, info, architecture, config)[0][0]
        )
    keys = Keys(file)
    options, classifier = classifier_of(keys)
    if classifier:
        config["classifier"] = options
        readers |= classifier
    kind = _TOKENIZERS.get(str(file.metadata.get("tokenizer.ggml.model")), HFTokenizer)
    tokenizer = kind.from_gguf(file.metadata, str(path))
    generation = {
        key: value
        for key, value in (
            ("bos_token_id", tokenizer.bos_id),
            ("eos_token_id", sorted(tokenizer.eos_ids)),
            *((name, _sampling_value(file, key)) for name, key in SAMPLING.items()),
        )
        if value not in (None, [])
    }
    return Checkpoint(
        name=path.stem,
        path=path,
        config=config,
        tensors=LazyTensors(path, readers),
        tokenizer=tokenizer,
        generation_config=generation,
        pooling=pooling_of(keys),
    )


def _sampling_value(file: GGUFFile, key: str) -> object:
    """A recommended sampling option, or None; a float32 as the shortest number that rounds to
    it."""
    value = file.metadata.get(key)
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _convert(
    file: GGUFFile, info: TensorInfo, architecture: str, config: Config
) -> list[tuple[str, Shape, Reader]]:
    """The Hugging Face tensors of one GGUF tensor: names, shapes and readers."""
    module, _, leaf = info.name.rpartition(".")
    is_own = is_own_vector(architecture, info.name)
    if leaf in SCALES and f"{module}.weight" in file.tensors and not is_own:
        return []
    if leaf in OWN_VECTORS.get(architecture, {}):
        module, leaf = info.name, ""
    if leaf not in ("weight", "bias", "") and not is_own:
        raise _unknown_tensor(file, info, architecture)
    if module in STACKS and config.get("altup_num_inputs"):
        return _stack(file, info, STACKS[module], config["altup_num_inputs"] - 1)
    if not module.startswith("blk."):
        if info.name in OUTER_VECTORS:
            return [_vector(file, info, OUTER_VECTORS[info.name], "", config)]
        outer = outer_names(architecture)
        if module not in outer:
            raise _unknown_tensor(file, info, architecture)
        root, _, part = outer[module].rpartition(".")
        target = f"{root}.{FAMILIES[config['model_type']].names.get(part, part)}".lstrip(".")
        prefix, part, layer = "", module, ""
    else:
        _, layer, part = module.split(".", 2) if module.count(".") >= 2 else ("", "", "")
        prefix = f"model.layers.{layer}."
        num_layers = config["num_hidden_layers"]
        if "stored_layers" in config:  # fewer than the model's
            num_layers = config["stored_layers"][-1] + 1
        num_unused = config.get("num_nextn_predict_layers", 0)
        is_extra = layer.isdigit() and num_layers <= int(layer) < num_layers + num_unused
        count = config.get("num_local_experts") or config.get("num_experts") or 0
        if is_extra and architecture in WITHOUT_NEXTN:
            return []
        module_prefix, module_names = NEXTN_MODULES.get(architecture, ("", {}))
        if is_extra and module_prefix:
            prefix = module_prefix.format(int(layer) - num_layers)
        if part in FACTORS.get(architecture, ()):
            return []
        stack = part
        if part.endswith(f"{OF_GROUPS}exps") and "experts_per_group" in config:
            stack, count = f"{part[:-4]}_exps", count // config["experts_per_group"]
        experts = _experts(file, info, architecture, stack, prefix, count)
        if experts:
            return experts
        if part in HEADS.get(architecture, {}):
            heads = config["num_attention_heads"]
            return _heads(file, info, HEADS[architecture][part], prefix, heads)
        is_layer = is_extra or (layer.isdigit() and int(layer) < num_layers)
        if layer == "0" and part in UNUSED_IN_FIRST.get(architecture, ()):
            return []
        if is_layer and architecture == "diffusion-gemma" and f"{part}.{leaf}" == CONTEXT_SCALE:
            return [_vector(file, info, f"context.layers.{layer}.layer_scalar", "model.", config)]
        vectors = {**VECTORS, **OWN_VECTORS.get(architecture, {})}
        vector = vectors.get(f"{part}.{leaf}".rstrip("."))
        if is_layer and vector is not None:
            return [_vector(file, info, vector, prefix, config)]
        names = layer_names(architecture)
        if is_extra:
            names |= {**NEXTN, **module_names}
        if is_extra and part not in names:
            return []
        if not is_layer or part not in names:
            raise _unknown_tensor(file, info, architecture)
        if part == "ffn_up" and config.get("has_gate_up"):
            names["ffn_up"] = "mlp.gate_up_proj"
        target = FAMILIES[config["model_type"]].names.get(names[part], names[part])
    name = f"{prefix}{target}.{leaf}"
    reader: Reader = partial(_read, file, info, f"{prefix}{target}")
    if target.endswith(".norm") and f"{target}.{leaf}" in FLAT:
        return [_vector(file, info, f"{target}.{leaf}", prefix, config)]
    if part in ("shortconv.conv", "ssm_conv1d", "ple_conv1d", *SEPARATE_CONVS) and leaf == "weight":
        shape = (info.shape[0], 1, *info.shape[1:])
        if part in SEPARATE_CONVS:
            shape = (math.prod(info.shape[:-1]), 1, info.shape[-1])
        return [(name, shape, partial(_as_shape, reader, shape))]
    if part in ("attn_q_norm", "attn_k_norm") and len(info.shape) == 2:  # of all heads
        return [(name, info.shape, partial(_as_shape, reader, info.shape))]
    if part == "ffn_gate_inp_shexp":
        row = (1, *info.shape)
        return [(name, row, partial(_as_shape, reader, row))]
    if architecture in INTERLEAVED and part in ("attn_q", "attn_k"):
        own = layer_config(config, int(layer))
        heads = own["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        reader = partial(deinterleaved, reader, heads)
    has_final_offset = FAMILIES[config["model_type"]].has_final_offset
    if has_one_added(architecture, info.name, has_final_offset):
        reader = partial(_minus_one, reader)
    found = [(name, info.shape, reader)]
    if architecture == "falcon" and part == "attn_norm":
        if f"{module}_2.weight" not in file.tensors:  # else that is the attention's
            found.append((f"{prefix}input_layernorm.{leaf}", info.shape, reader))
    return found


def _vector(
    file: GGUFFile, info: TensorInfo, name: str, prefix: str, config: Config
) -> tuple[str, Shape, Reader]:
    """A tensor of a layer under its whole name, in the shape of Hugging Face's layout; one that
    does not fit it keeps its own."""
    reader: Reader = partial(_read, file, info, prefix + name)
    shapes = time_mix_vectors(config) if config["model_type"] in TIME_MIXING else {}
    is_flat = name in FLAT and config["model_type"] != "jamba"  # whose decay is a matrix
    shape = (math.prod(info.shape),) if is_flat else shapes.get(name, info.shape)
    if math.prod(shape) != math.prod(info.shape):
        shape = info.shape
    return prefix + name, shape, partial(_as_shape, reader, shape)


def _unknown_tensor(file: GGUFFile, info: TensorInfo, architecture: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: tensor {info.name!r} is not part of the {architecture} models supported"
    )


def _experts(
    file: GGUFFile, info: TensorInfo, architecture: str, part: str, prefix: str, count: int
) -> list[tuple[str, Shape, Reader]]:
    """The tensors of experts, which are stored in one tensor or (in old files) one tensor each."""
    table = EXPERTS.get(architecture, {})
    leaf = info.name.rpartition(".")[2]
    num_axes = 2 if leaf == "bias" else 3
    if part.endswith("_exps") and part[:-5] in table and len(info.shape) == num_axes:
        if info.shape[0] != count:
            raise CheckpointError(
                f"{file.path}: {info.name!r} has {info.shape[0]} experts; expert_count is {count}"
            )
        modules = [prefix + table[part[:-5]].format(i) for i in range(info.shape[0])]
        return [
            (f"{module}.{leaf}", info.shape[1:], partial(_read_part, file, info, index, module))
            for index, module in enumerate(modules)
        ]
    if part == "ffn_gate_up_exps" and table and len(info.shape) == 3 and info.shape[0] == count:
        inner = info.shape[1] // 2
        parts = {"ffn_gate": slice(0, inner), "ffn_up": slice(inner, None)}
        return [
            (
                f"{prefix}{table[kind].format(i)}.weight",
                (inner, info.shape[2]),
                partial(_read_rows, file, info, i, prefix + table[kind].format(i), rows),
            )
            for i in range(count)
            for kind, rows in parts.items()
        ]
    kind, _, index = part.partition(".")
    if kind in table and index.isdigit():
        module = prefix + table[kind].format(int(index))
        return [(f"{module}.{leaf}", info.shape, partial(_read, file, info, module))]
    return []


def _heads(
    file: GGUFFile, info: TensorInfo, part: str, prefix: str, count: int
) -> list[tuple[str, Shape, Reader]]:
    """The matrices of the heads of latent attention, which are stored in one tensor. Some files
    have them in another layout too."""
    if f"{info.name.rpartition('.attn_')[0]}.attn_kv_b.weight" in file.tensors:
        return []
    if len(info.shape) != 3 or info.shape[0] != count:
        raise CheckpointError(
            f"{file.path}: {info.name!r} has shape {list(info.shape)}; allowed are matrices of"
            f" {count} heads"
        )
    modules = [prefix + part.format(head) for head in range(count)]
    return [
        (f"{module}.weight", info.shape[1:], partial(_read_part, file, info, head, module))
        for head, module in enumerate(modules)
    ]


def _stack(
    file: GGUFFile, info: TensorInfo, module: str, count: int
) -> list[tuple[str, Shape, Reader]]:
    """The matrices of a stack outside the layers."""
    if len(info.shape) != 3 or info.shape[0] != count:
        raise CheckpointError(
            f"{file.path}: {info.name!r} has shape {list(info.shape)}; allowed are {count} matrices"
        )
    names = [module.format(index) for index in range(count)]
    return [
        (f"{name}.weight", info.shape[1:], partial(_read_part, file, info, index, name))
        for index, name in enumerate(names)
    ]


def _read_part(file: GGUFFile, info: TensorInfo, index: int, module: str) -> np.ndarray | Weight:
    return _scaled(file, info, file.part(info.name, index, module), index)


def _read_rows(
    file: GGUFFile, info: TensorInfo, index: int, module: str, rows: slice
) -> np.ndarray | Weight:
    """Some rows of one expert's matrix."""
    tensor = _read_part(file, info, index, module)
    if not isinstance(tensor, Weight):
        return tensor[rows]
    data = tensor.data[rows]
    return replace(tensor, data=data, out_features=len(data))


def _scaled(
    file: GGUFFile, info: TensorInfo, tensor: np.ndarray | Weight, index: int
) -> np.ndarray | Weight:
    """A weight multiplied by the factor that the file has for it, if any; `index` is that of an
    expert."""
    module, _, leaf = info.name.rpartition(".")
    name = f"{module}.scale"
    architecture = str(file.metadata.get("general.architecture"))
    if leaf != "weight" or name not in file.tensors or is_own_vector(architecture, name):
        return tensor
    scales = file.read(name)
    count = info.shape[0] if len(info.shape) == 3 else 1
    if not isinstance(scales, np.ndarray) or scales.dtype != np.float32 or scales.size != count:
        raise CheckpointError(
            f"{file.path}: {name!r} is {file.tensors[name].format} of shape"
            f" {list(file.tensors[name].shape)}, not F32 of shape [{count}]"
        )
    scale = float(scales[index])
    if isinstance(tensor, Weight):
        return replace(tensor, scale=scale)
    return tensor.astype(np.float32) * np.float32(scale)


def _read(file: GGUFFile, info: TensorInfo, module: str) -> np.ndarray | Weight:
    tensor = _scaled(file, info, file.view(info, module), 0)
    if isinstance(tensor, Weight) and len(info.shape) == 1:
        return dequantize(tensor).ravel()
    return tensor


def matrix_tensors(file: GGUFFile) -> dict[str, tuple[str, np.ndarray]]:
    """The matrices that are stored as one tensor each.

    Returns:
        By the name in the Hugging Face layout: the name of the GGUF tensor, and which row of it is
        each row of the matrix, int64 `[out_features]`.
    """
    config = config_from_gguf(file)
    architecture: str = file.metadata["general.architecture"]
    found: dict[str, tuple[str, np.ndarray]] = {}
    for info in file.tensors.values():
        if len(info.shape) != 2 or info.name in IN_CONFIG or is_beside_network(info.name):
            continue
        converted = _convert(file, info, architecture, config)
        if len(converted) != 1:
            continue
        name, _, reader = converted[0]
        order = np.arange(info.shape[0])
        if isinstance(reader, partial) and reader.func is deinterleaved:
            order = half_order(info.shape[0], reader.args[1])
        found[name] = info.name, order
    return found


def matrix_parts(file: GGUFFile) -> dict[str, tuple[str, int, int]]:
    """Where the matrices of layers are stored.

    Returns:
        By the name in the Hugging Face layout, fused ones under the name of one part: the name of
        the GGUF tensor, the number of the matrix in it, and how many it has (those of experts).
    """
    config = config_from_gguf(file)
    architecture: str = file.metadata["general.architecture"]
    found: dict[str, tuple[str, int, int]] = {}
    for info in file.tensors.values():
        is_layer = info.name.startswith("blk.") and info.name.endswith(".weight")
        if not is_layer or len(info.shape) not in (2, 3):
            continue
        converted = _convert(file, info, architecture, config)
        count = info.shape[0] if len(info.shape) == 3 else 1
        for number, (name, shape, _) in enumerate(converted):
            if len(shape) != 2:
                continue
            for fused, part in (("qkv_proj", "q_proj"), ("gate_up_proj", "up_proj")):
                name = name.replace(f".{fused}.", f".{part}.")
            found[name] = info.name, number * count // len(converted), count
    return found


def _as_shape(reader: Reader, shape: Shape) -> np.ndarray:
    """A small tensor in a shape."""
    tensor = reader()
    return (dequantize(tensor) if isinstance(tensor, Weight) else tensor).reshape(shape)


def _minus_one(reader: Reader) -> np.ndarray:
    """A norm weight of Gemma or Qwen3.5 as Hugging Face stores it; GGUF stores it with 1 added."""
    tensor = reader()
    assert isinstance(tensor, np.ndarray), "norms are vectors"
    return tensor.astype(np.float32) - 1

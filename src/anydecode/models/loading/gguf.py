"""Loads a GGUF file as a `Checkpoint` with Hugging Face names; weights stay packed and mapped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import (
    is_expert_layer,
    num_experts,
    shared_size,
    spec_from_config,
)
from anydecode.models.families.patterns import cache_layers
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config, layer_config
from anydecode.models.loading.gguf_config import config_from_gguf
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
#: Modules outside the layers that have another meaning in one architecture.
_OWN_OUTER = {
    "bloom": {"token_embd_norm": "model.embed_norm"},
    "rwkv7": {"token_embd_norm": "model.embed_norm"},
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
#: Embeddings of tokens in every layer.
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
#: The tensors of a layer that predicts further tokens beside those of other layers.
_NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
#: Several streams of hidden states.
_STREAMS = {
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
#: Stacks of matrices outside the layers.
_STACKS = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_OVERRIDES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3n": {**_SANDWICH, **_PER_LAYER, **_STREAMS},
    "gemma4": {
        **_SANDWICH,
        **_PER_LAYER,
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    "olmo2": _POST_NORMS,
    "exaone4": _POST_NORMS,
    "glm4": {**_SANDWICH, "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "gpt2": {"attn_qkv": "self_attn.qkv_proj"},
    "gptneox": {"attn_qkv": "self_attn.qkv_proj"},
    "falcon": {"attn_qkv": "self_attn.qkv_proj", "attn_norm_2": "input_layernorm"},
    "bloom": {"attn_qkv": "self_attn.qkv_proj"},
    "mpt": {"attn_qkv": "self_attn.qkv_proj"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "llada-moe": {"ffn_gate_inp": "mlp.gate"},
    "rnd1": {"ffn_gate_inp": "mlp.gate"},
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "olmoe": {"ffn_gate_inp": "mlp.gate"},
    "lfm2": {
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    "mamba": {
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_out": "mixer.out_proj",
    },
    "rwkv7": {
        "attn_norm_2": "post_attention_layernorm",
        "time_mix_receptance": "attn.r_proj",
        "time_mix_key": "attn.k_proj",
        "time_mix_value": "attn.v_proj",
        "time_mix_output": "attn.o_proj",
        "time_mix_ln": "attn.g_norm",
        **{f"time_mix_{x}1": f"attn.{x}_lora.lora.0" for x in "wavg"},
        **{f"time_mix_{x}2": f"attn.{x}_lora.lora.2" for x in "wavg"},
        "channel_mix_key": "mlp.up_proj",
        "channel_mix_value": "mlp.down_proj",
    },
    "qwen2moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "llama4": {
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
}
_MLP_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
_EXPERTS = {
    "llama": {
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    },
    "gemma4": {part: name.removeprefix("mlp.") for part, name in _MLP_EXPERTS.items()},
    "llama4": {part: name.replace("mlp", "feed_forward") for part, name in _MLP_EXPERTS.items()},
    **dict.fromkeys(
        (
            "qwen2moe",
            "qwen3moe",
            "olmoe",
            "glm4moe",
            "gpt-oss",
            "deepseek2",
            "llada-moe",
            "rnd1",
        ),
        _MLP_EXPERTS,
    ),
}
#: Stacks of matrices, one for each head, of latent attention.
_HEADS = {
    "deepseek2": {
        "attn_k_b": "self_attn.k_b_proj.{}",
        "attn_v_b": "self_attn.v_b_proj.{}",
    }
}
#: Vectors whose Hugging Face names have no suffix.
_VECTORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "mixer.A",
    "ssm_d": "mixer.D",
}
#: Vectors of one architecture that have the names of factors of a weight elsewhere, or no suffix.
_OWN_VECTORS = {
    "gemma3n": {"altup_correct_scale.weight": "altup.correct_output_scale"},
    "gemma4": {
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    },
    "rwkv7": {
        "time_mix_lerp_fused.weight": "attn.x_x",
        "time_mix_k_k.weight": "attn.k_k",
        "time_mix_k_a.weight": "attn.k_a",
        "time_mix_r_k.weight": "attn.r_k",
        **{f"time_mix_{x}0.weight": f"attn.{x}_lora.lora.2.bias" for x in "wav"},
        "channel_mix_lerp_k.weight": "ffn.x_k",
    },
}
#: RWKV-7: the first layer does not mix its values; files have another product's in that place.
_UNUSED_IN_FIRST = ("time_mix_v0", "time_mix_v1", "time_mix_v2")
#: Factors of a weight, which are read with it, and of activations, which are not used.
_SCALES = ("scale", "input_scale")
#: Rope factors, which are read into the config.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Architectures whose query and key rows are stored for interleaved rotary pairs.
_INTERLEAVED = ("llama", "smollm3", "granite", "minicpm", "mistral3", "llada")

_Shape = tuple[int, ...]
_KEYS_VALUES = ("k_proj", "v_proj")


def load_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        CheckpointError: The file is truncated, corrupt or unsupported. The message is one line.
    """
    file = GGUFFile(path)
    config = config_from_gguf(file)
    spec_from_config(config)  # validated before lists of layers and experts are built
    architecture: str = file.metadata["general.architecture"]
    readers: dict[str, Reader] = {}
    shapes: dict[str, _Shape] = {}
    for info in file.tensors.values():
        if info.name in _IN_CONFIG or info.name.endswith(".attn_rot_embd"):
            continue
        for name, shape, reader in _convert(file, info, architecture, config):
            readers[name], shapes[name] = reader, shape
    _check_shapes(path, architecture, config, shapes)
    is_rwkv = file.metadata.get("tokenizer.ggml.model") == "rwkv"
    kind = RwkvTokenizer if is_rwkv else HFTokenizer
    tokenizer = kind.from_gguf(file.metadata, str(path))
    generation = {
        key: value
        for key, value in (
            ("bos_token_id", tokenizer.bos_id),
            ("eos_token_id", sorted(tokenizer.eos_ids)),
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
    )


def _convert(
    file: GGUFFile, info: TensorInfo, architecture: str, config: Config
) -> list[tuple[str, _Shape, Reader]]:
    """The Hugging Face tensors of one GGUF tensor: names, shapes and readers."""
    module, _, leaf = info.name.rpartition(".")
    is_own = is_own_vector(architecture, info.name)
    if leaf in _SCALES and f"{module}.weight" in file.tensors and not is_own:
        return []
    if leaf in _VECTORS and architecture == "mamba":
        module, leaf = info.name, ""
    if leaf not in ("weight", "bias", "") and not is_own:
        raise _unknown_tensor(file, info, architecture)
    if module in _STACKS and config.get("altup_num_inputs"):
        return _stack(file, info, _STACKS[module], config["altup_num_inputs"] - 1)
    if not module.startswith("blk."):
        outer = {**_OUTER, **_OWN_OUTER.get(architecture, {})}
        if module not in outer:
            raise _unknown_tensor(file, info, architecture)
        root, _, part = outer[module].rpartition(".")
        target = f"{root}.{FAMILIES[config['model_type']].names.get(part, part)}".lstrip(".")
        prefix, part = "", module
    else:
        _, layer, part = module.split(".", 2) if module.count(".") >= 2 else ("", "", "")
        prefix = f"model.layers.{layer}."
        num_layers = config["num_hidden_layers"]
        num_unused = config.get("num_nextn_predict_layers", 0)
        is_extra = layer.isdigit() and num_layers <= int(layer) < num_layers + num_unused
        count = config.get("num_local_experts") or config.get("num_experts") or 0
        experts = _experts(file, info, architecture, part, prefix, count)
        if experts:
            return experts
        if part in _HEADS.get(architecture, {}):
            heads = config["num_attention_heads"]
            return _heads(file, info, _HEADS[architecture][part], prefix, heads)
        is_layer = is_extra or (layer.isdigit() and int(layer) < num_layers)
        vectors = {**_VECTORS, **_OWN_VECTORS.get(architecture, {})}
        vector = vectors.get(f"{part}.{leaf}".rstrip("."))
        if architecture == "rwkv7" and layer == "0" and part in _UNUSED_IN_FIRST:
            return []
        if is_layer and vector is not None:
            own: Reader = partial(_read, file, info, prefix + vector)
            shape = _own_shape(vector, info.shape, config)
            if shape != info.shape:
                own = partial(_as_shape, own, shape)
            return [(prefix + vector, shape, own)]
        names = {**_LAYER, **_OVERRIDES.get(architecture, {}), **(_NEXTN if is_extra else {})}
        if is_extra and part not in names:
            return []
        if not is_layer or part not in names:
            raise _unknown_tensor(file, info, architecture)
        target = FAMILIES[config["model_type"]].names.get(names[part], names[part])
    name = f"{prefix}{target}.{leaf}"
    reader: Reader = partial(_read, file, info, f"{prefix}{target}")
    if part in ("shortconv.conv", "ssm_conv1d") and leaf == "weight":
        shape = (info.shape[0], 1, *info.shape[1:])
        return [(name, shape, partial(_as_shape, reader, shape))]
    if part == "ffn_gate_inp_shexp":
        row = (1, *info.shape)
        return [(name, row, partial(_as_shape, reader, row))]
    if architecture in _INTERLEAVED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        reader = partial(_deinterleaved, reader, heads)
    if architecture in ("gemma2", "gemma3") and info.name.endswith("norm.weight"):
        reader = partial(_minus_one, reader)
    found = [(name, info.shape, reader)]
    if architecture == "falcon" and part in ("attn_norm", "attn_norm_2"):
        # The second norm is the attention's, if there are two.
        has_both = f"{module.removesuffix('_2')}_2.weight" in file.tensors
        second = f"{prefix}post_attention_layernorm.{leaf}"
        if part == "attn_norm":
            found = [(second, info.shape, reader)] + ([] if has_both else found)
    return found


def _own_shape(vector: str, shape: _Shape, config: Config) -> _Shape:
    """The shape of a vector in Hugging Face's layout; a stored one that does not fit stays."""
    shapes: dict[str, _Shape] = {}
    if config["model_type"] == "rwkv7":
        hidden, dim = config["hidden_size"], config["head_dim"]
        shapes = {
            "attn.x_x": (6, hidden),
            "attn.r_k": (hidden // dim, dim),
            "ffn.x_k": (hidden,),
        }
    own = shapes.get(vector, shape)
    return own if math.prod(own) == math.prod(shape) else shape


def is_own_vector(architecture: str, name: str) -> bool:
    """Whether a tensor is a vector of the layers of `architecture` that has the name of a factor of
    a weight in other files, or no suffix in Hugging Face's layout."""
    return name.split(".", 2)[-1] in _OWN_VECTORS.get(architecture, {})


def _unknown_tensor(file: GGUFFile, info: TensorInfo, architecture: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: tensor {info.name!r} is not part of the {architecture} models supported"
    )


def _experts(
    file: GGUFFile, info: TensorInfo, architecture: str, part: str, prefix: str, count: int
) -> list[tuple[str, _Shape, Reader]]:
    """The tensors of experts, which are stored in one tensor or (in old files) one tensor each."""
    table = _EXPERTS.get(architecture, {})
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
) -> list[tuple[str, _Shape, Reader]]:
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
) -> list[tuple[str, _Shape, Reader]]:
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


def _deinterleaved(reader: Reader, num_heads: int) -> np.ndarray | Weight:
    """Reorder the rows of interleaved rotary pairs (2i, 2i + 1) to pairs (i, i + half). Whole rows
    are moved, so packed weights stay packed."""
    tensor = reader()
    data = tensor.data if isinstance(tensor, Weight) else tensor
    rows = np.arange(len(data)).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    moved = data[rows]
    if isinstance(tensor, Weight):
        return replace(tensor, data=moved)
    return moved


def _as_shape(reader: Reader, shape: _Shape) -> np.ndarray:
    """A small tensor with another shape."""
    tensor = reader()
    return (dequantize(tensor) if isinstance(tensor, Weight) else tensor).reshape(shape)


def _minus_one(reader: Reader) -> np.ndarray:
    """A norm weight of Gemma as Hugging Face stores it; GGUF stores it with 1 added."""
    tensor = reader()
    assert isinstance(tensor, np.ndarray), "norms are vectors"
    return tensor.astype(np.float32) - 1


def _check_shapes(path: Path, architecture: str, config: Config, shapes: dict[str, _Shape]) -> None:
    """Check that every tensor the config requires is present and has the right shape."""
    for name, shape, required in _expected_shapes(architecture, config):
        found = shapes.get(name)
        if found is None and required:
            raise CheckpointError(f"{path}: the tensor for {name!r} is missing")
        if found is not None and found != shape:
            raise CheckpointError(
                f"{path}: {name!r} has shape {list(found)}; its metadata imply {list(shape)}"
            )


def _expected_shapes(architecture: str, config: Config) -> Iterator[tuple[str, _Shape, bool]]:
    """Yield names, shapes, and whether the tensor is required (most biases are not)."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    family = FAMILIES[config["model_type"]]
    yield f"model.{family.names.get('embed_tokens', 'embed_tokens')}.weight", (vocab, hidden), True
    yield f"model.{family.names.get('norm', 'norm')}.weight", (hidden,), True
    yield "lm_head.weight", (vocab, hidden), False
    if family.has_norm_bias:
        yield "model.norm.bias", (hidden,), True
    if family.has_embedding_norm:
        name = family.names.get("embed_norm", "embed_norm")
        for leaf in ("weight", "bias"):
            yield f"model.{name}.{leaf}", (hidden,), True
    if family.has_position_table:
        positions = config["max_position_embeddings"]
        yield "model.embed_positions.weight", (positions, hidden), True
    per_layer = config.get("hidden_size_per_layer_input", 0)
    if per_layer:
        width = config["num_hidden_layers"] * per_layer
        rows = config.get("vocab_size_per_layer_input", vocab)
        yield "model.embed_tokens_per_layer.weight", (rows, width), True
        yield "model.per_layer_model_projection.weight", (width, hidden), True
        yield "model.per_layer_projection_norm.weight", (per_layer,), True
    streams = config["altup_num_inputs"] if family.has_streams else 0
    for name in _STACKS.values() if streams else ():
        for index in range(streams - 1):
            yield f"{name.format(index)}.weight", (hidden, hidden), True
    layer_types = config.get("layer_types") or []
    sources = cache_layers(config, layer_types) if config.get("num_kv_shared_layers") else []
    for layer in range(config["num_hidden_layers"]):
        start, own = f"model.layers.{layer}.", layer_config(config, layer)
        matrices, vectors = _attention_shapes(architecture, own)
        vectors |= _norm_shapes(config, layer)
        if sources and sources[layer] is not None:
            matrices = {x: shape for x, shape in matrices.items() if x[-6:] not in _KEYS_VALUES}
            del vectors["self_attn.k_norm"]
        elif config.get("attention_k_eq_v") and layer_types[layer] == "full_attention":
            del matrices["self_attn.v_proj"]
        if per_layer:
            matrices["per_layer_input_gate"] = (per_layer, hidden)
            matrices["per_layer_projection"] = (hidden, per_layer)
        if streams:
            more_matrices, more_vectors = _stream_shapes(config)
            matrices, vectors = matrices | more_matrices, vectors | more_vectors
            yield f"{start}altup.correct_output_scale", (hidden,), True
        if layer_types[layer : layer + 1] == ["conv"]:
            yield f"{start}conv.conv.weight", (hidden, 1, config["conv_L_cache"]), True
            matrices = {"conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}
            vectors = {name: size for name, size in vectors.items() if "self_attn" not in name}
        if architecture == "rwkv7":
            matrices, vectors = _time_mix_shapes(config, layer), vectors | {"attn.g_norm": hidden}
            for part, shape in _time_mix_vectors(config, layer).items():
                yield f"{start}{part}", shape, True
        if architecture == "mamba":
            inner, size, rank = (
                config[key] for key in ("intermediate_size", "state_size", "time_step_rank")
            )
            matrices = {
                "mixer.in_proj": (2 * inner, hidden),
                "mixer.x_proj": (rank + 2 * size, inner),
                "mixer.dt_proj": (inner, rank),
                "mixer.out_proj": (hidden, inner),
            }
            vectors = {"input_layernorm": hidden}
            yield f"{start}mixer.conv1d.weight", (inner, 1, config["conv_kernel"]), True
            yield f"{start}mixer.conv1d.bias", (inner,), config["use_conv_bias"]
            yield f"{start}mixer.dt_proj.bias", (inner,), True
            yield f"{start}mixer.A", (inner, size), True
            yield f"{start}mixer.D", (inner,), True
        for module, shape in {**matrices, **_mlp_shapes(architecture, own, layer)}.items():
            name = f"{start}{family.names.get(module, module)}"
            yield f"{name}.weight", shape, True
            has_bias = config.get("qkv_bias", family.qkv_bias)
            required = has_bias and module[-6:] in ("q_proj", "k_proj", "v_proj")
            yield f"{name}.bias", shape[:1], required
        for module, size in vectors.items():
            name = f"{start}{family.names.get(module, module)}"
            yield f"{name}.weight", (size,), True
            if family.has_norm_bias:
                yield f"{name}.bias", (size,), True
        if family.has_sinks:
            yield f"{start}self_attn.sinks", (config["num_attention_heads"],), True
        has_selection_bias = family.moe is not None and family.moe.has_selection_bias
        if has_selection_bias and is_expert_layer(config, layer):
            yield f"{start}mlp.gate.e_score_correction_bias", (num_experts(config),), True


def _time_mix_ranks(config: Config, layer: int) -> dict[str, int]:
    """The ranks of the low-rank products of RWKV-7's time mixing."""
    keys = {"w": "decay", "a": "a", "g": "gate"} | ({"v": "v"} if layer else {})
    return {part: config[f"{key}_low_rank_dim"] for part, key in keys.items()}


def _time_mix_shapes(config: Config, layer: int) -> dict[str, _Shape]:
    """The shapes of the matrices of RWKV-7's time mixing."""
    hidden = config["hidden_size"]
    shapes: dict[str, _Shape] = {f"attn.{part}_proj": (hidden, hidden) for part in "rkvo"}
    for part, rank in _time_mix_ranks(config, layer).items():
        shapes[f"attn.{part}_lora.lora.0"] = (rank, hidden)
        shapes[f"attn.{part}_lora.lora.2"] = (hidden, rank)
    return shapes


def _time_mix_vectors(config: Config, layer: int) -> dict[str, _Shape]:
    """The shapes of the vectors of RWKV-7, but for its norms."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    names = ["attn.k_k", "attn.k_a", "ffn.x_k"]
    names += [f"attn.{x}_lora.lora.2.bias" for x in _time_mix_ranks(config, layer) if x != "g"]
    vectors: dict[str, _Shape] = {name: (hidden,) for name in names}
    return {**vectors, "attn.x_x": (6, hidden), "attn.r_k": (hidden // dim, dim)}


def _stream_shapes(config: Config) -> tuple[dict[str, _Shape], dict[str, int]]:
    """The shapes of the matrices and norms by which a layer predicts and corrects streams."""
    hidden, count, rank = (
        config[key] for key in ("hidden_size", "altup_num_inputs", "laurel_rank")
    )
    matrices: dict[str, _Shape] = {
        "altup.modality_router": (count, hidden),
        "altup.prediction_coefs": (count * count, count),
        "altup.correction_coefs": (count, count),
        "laurel.linear_left": (rank, hidden),
        "laurel.linear_right": (hidden, rank),
    }
    return matrices, {"altup.router_norm": hidden, "laurel.post_laurel_norm": hidden}


def _norm_shapes(config: Config, layer: int) -> dict[str, int]:
    """The sizes of a layer's norms, but for those of its attention."""
    family, hidden = FAMILIES[config["model_type"]], config["hidden_size"]
    names = ["post_attention_layernorm"]
    if family.norms != "post":
        names.append("input_layernorm")
    if family.norms != "pre":
        names.append("post_feedforward_layernorm")
    if family.norms == "both":
        names.append("pre_feedforward_layernorm")
    if config.get("hidden_size_per_layer_input"):
        names.append("post_per_layer_input_norm")
    if family.moe is not None and family.moe.has_norms and is_expert_layer(config, layer):
        names += [f"post_feedforward_layernorm_{i}" for i in (1, 2)]
        names.append("pre_feedforward_layernorm_2")
    return {name: hidden for name in names}


def _attention_shapes(
    architecture: str, config: Config
) -> tuple[dict[str, _Shape], dict[str, int]]:
    """The shapes of the matrices and of the norms of a layer's attention."""
    family = FAMILIES[config["model_type"]]
    if family.has_latent_attention:
        return _latent_shapes(config)
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices: dict[str, _Shape] = {"self_attn.o_proj": (hidden, q)}
    if "attn_qkv" in _OVERRIDES.get(architecture, {}):
        matrices["self_attn.qkv_proj"] = (q + 2 * kv, hidden)
    else:
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            matrices[f"self_attn.{part}_proj"] = (rows, hidden)
    if family.qk_norm in (None, "plain") or not config.get("use_qk_norm", True):
        return matrices, {}
    full = family.qk_norm == "full"
    norms = {"self_attn.q_norm": q if full else head, "self_attn.k_norm": kv if full else head}
    return matrices, norms


def _latent_shapes(config: Config) -> tuple[dict[str, _Shape], dict[str, int]]:
    """The same of latent attention."""
    hidden, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    key, rotary, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query, inner = heads * (key + rotary), config["q_lora_rank"]
    matrices: dict[str, _Shape] = {
        "self_attn.kv_a_proj_with_mqa": (rank + rotary, hidden),
        "self_attn.o_proj": (hidden, heads * value),
    }
    norms = {"self_attn.kv_a_layernorm": rank}
    if inner is None:
        matrices["self_attn.q_proj"] = (query, hidden)
    else:
        matrices |= {
            "self_attn.q_a_proj": (inner, hidden),
            "self_attn.q_b_proj": (query, inner),
        }
        norms["self_attn.q_a_layernorm"] = inner
    if config["has_stacked_heads"]:
        for head in range(heads):
            matrices[f"self_attn.k_b_proj.{head}"] = (rank, key)
            matrices[f"self_attn.v_b_proj.{head}"] = (value, rank)
    else:
        matrices["self_attn.kv_b_proj"] = (heads * (key + value), rank)
    return matrices, norms


def _mlp_shapes(architecture: str, config: Config, layer: int) -> dict[str, _Shape]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if architecture in ("phi3", "glm4"):
        return {"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)}
    if FAMILIES[config["model_type"]].mlp == "none":
        return {}
    if FAMILIES[config["model_type"]].mlp == "plain":
        return {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    moe = FAMILIES[config["model_type"]].moe
    dense = _gated_shapes("mlp", inner, hidden)
    if moe is None or not is_expert_layer(config, layer):
        return dense
    experts, inner = num_experts(config), config[moe.inner_size]
    shapes: dict[str, _Shape] = dense if moe.has_norms else {}
    shapes |= {_OVERRIDES[architecture]["ffn_gate_inp"]: (experts, hidden)}
    for part, module in _EXPERTS[architecture].items():
        shape = (hidden, inner) if part == "ffn_down" else (inner, hidden)
        shapes |= {module.format(index): shape for index in range(experts)}
    size, name = shared_size(config, moe), f"mlp.{moe.shared_module}"
    if size:
        shapes |= _gated_shapes(name, size, hidden)
        if moe.has_shared_gate:
            shapes[f"{name}_gate"] = (1, hidden)
    return shapes


def _gated_shapes(name: str, inner: int, hidden: int) -> dict[str, _Shape]:
    """The shapes of the matrices of a gated MLP."""
    up = (inner, hidden)
    return {f"{name}.gate_proj": up, f"{name}.up_proj": up, f"{name}.down_proj": (hidden, inner)}

"""Small random models as GGUF files and checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight

HIDDEN, INNER, HEADS, KV, HEAD, LAYERS, VOCAB = 64, 96, 4, 2, 16, 3, 40
EXPERTS = 4
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
PRE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
QK = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FAMILIES: dict[str, dict[str, str]] = {
    "llama": {**ATTENTION, **MLP, **PRE},
    "smollm3": {**ATTENTION, **MLP, **PRE},
    "qwen2": {**ATTENTION, **MLP, **PRE},
    "qwen3": {**ATTENTION, **MLP, **PRE, **QK},
    "gemma2": {**ATTENTION, **MLP, **GEMMA},
    "gemma3": {**ATTENTION, **MLP, **GEMMA, **QK},
    "olmo2": {
        **ATTENTION,
        **MLP,
        **QK,
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        **PRE,
    },
}


def shape_of(module: str, family: str, hidden: int = HIDDEN) -> tuple[int, ...]:
    rows = {
        "self_attn.q_proj": HEADS * HEAD,
        "self_attn.k_proj": KV * HEAD,
        "self_attn.v_proj": KV * HEAD,
        "self_attn.qkv_proj": (HEADS + 2 * KV) * HEAD,
        "mlp.gate_proj": INNER,
        "mlp.up_proj": INNER,
        "mlp.gate_up_proj": 2 * INNER,
    }
    if module.endswith("norm"):
        if "self_attn" not in module:
            return (hidden,)
        if family != "olmo2":
            return (HEAD,)
        return (HEADS * HEAD,) if module.endswith("q_norm") else (KV * HEAD,)
    if module == "self_attn.o_proj":
        return (hidden, HEADS * HEAD)
    return (hidden, INNER) if module == "mlp.down_proj" else (rows[module], hidden)


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of queries and keys like the converter: pairs (i, i + half) to (2i, 2i + 1)."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def make_tensors(
    family: str,
    tied: bool = False,
    vocab_size: int = VOCAB,
    hidden_size: int = HIDDEN,
    num_hidden_layers: int = LAYERS,
) -> dict[str, np.ndarray]:
    """Tensors of a random model by Hugging Face name."""
    generator = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden_size),
        "model.norm.weight": (hidden_size,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    for layer in range(num_hidden_layers):
        for module in FAMILIES[family]:
            shape = shape_of(module, family, hidden_size)
            shapes[f"model.layers.{layer}.{module}.weight"] = shape
            if family == "qwen2" and module in list(ATTENTION)[:3]:
                shapes[f"model.layers.{layer}.{module}.bias"] = shape[:1]
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-6,
}


def usual_metadata(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for every model of `transformers`."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    head_dim = config.get("head_dim") or config["hidden_size"] // (heads or 1)
    eps = config.get("layer_norm_eps") or config.get("norm_epsilon")
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    rms_eps = next((config[name] for name in names if name in config), None)
    return {
        "block_count": num_layers,
        "context_length": config.get("max_position_embeddings"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": None if eps else rms_eps,
        "rope.freq_base": 5000.0,
    }


def tensor_names(architecture: str, num_layers: int) -> Any:
    """The names of GGUF tensors by those of `transformers`."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, num_layers)


def start_writer(path: Path, family: str, sizes: dict[str, Any] = SIZES) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes.get("value_dim", sizes["head_dim"]))
    writer.add_context_length(256)
    if "rms_norm_eps" in sizes:
        writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_rope_freq_base(5000.0)
    if family.startswith("gemma"):
        writer.add_sliding_window(8)
    vocab = sizes["vocab_size"]
    tokens = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(vocab - 3))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3] + [1] * (vocab - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def add_metadata(writer: gguf.GGUFWriter, architecture: str, metadata: dict[str, Any]) -> None:
    """Add the metadata of an architecture, without those that are None."""
    for key, value in metadata.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, np.ndarray):  # of integers that may exceed 32 bits
            kind, inner = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            writer.add_key_value(name, value.tolist(), kind, sub_type=inner)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_float32(name, value)


def writer_with(
    path: Path, architecture: str, metadata: dict[str, Any], vocab: int
) -> gguf.GGUFWriter:
    """A writer with the metadata of an architecture, without those that are None, and `vocab`
    tokens, if there are some."""
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, architecture, metadata)
    if vocab == 0:
        return writer
    tokens = ["<unk>", "<s>", "</s>", *(chr(200 + i) for i in range(vocab - 3))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewrite(
    path: Path,
    dropped: Iterable[str] = (),
    metadata: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Write a file again: without some tensors, with more metadata of its architecture in place of
    those of the same names, and with more tensors."""
    reader = gguf.GGUFReader(path)
    kept = {t.name: np.array(t.data) for t in reader.tensors if t.name not in dropped}
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    replaced = {"general.architecture", *(f"{architecture}.{key}" for key in metadata)}
    for key, stored in reader.fields.items():
        if key.startswith("GGUF.") or key in replaced:
            continue
        kind = stored.types[0]
        inner = stored.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, stored.contents(), kind, sub_type=inner)
    add_metadata(writer, architecture, dict(metadata))
    for name, tensor in {**kept, **tensors}.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    path.with_suffix(".new").replace(path)


def write_gguf(
    path: Path,
    family: str,
    tensors: dict[str, np.ndarray],
    format: str = "F32",
    sizes: dict[str, Any] = SIZES,
    factors: dict[str, Any] | None = None,
) -> None:
    """Convert like llama.cpp's converter: names, interleaved rows, norms with 1 added.

    `factors` has the factors of weights and of their inputs by the modules' names in layers.
    """
    writer = start_writer(path, family, sizes)
    for name, tensor in tensors.items():
        if name in OUTER:
            target = OUTER[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            module, leaf = rest.rsplit(".", 1)
            target = f"blk.{layer}.{FAMILIES[family][module]}.{leaf}"
            if family in ("llama", "smollm3") and module[-6:] in ("q_proj", "k_proj"):
                kind = "attention" if module.endswith("q_proj") else "key_value"
                tensor = interleave(tensor, sizes[f"num_{kind}_heads"])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.ndim == 2 and format in FEW_BITS:
            encode, code, values = FEW_BITS[format]
            gguf.constants.GGML_QUANT_SIZES.setdefault(code, (values, 18))
            writer.add_tensor(target, encode(tensor), raw_dtype=code)
            continue
        kind = gguf.GGMLQuantizationType[format if tensor.ndim == 2 else "F32"]
        writer.add_tensor(target, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    for module, factor in (factors or {}).items():
        for layer in range(sizes["num_hidden_layers"]):
            for leaf in ("scale", "input_scale"):
                values = np.atleast_1d(np.asarray(factor, np.float32))
                writer.add_tensor(f"blk.{layer}.{module}.{leaf}", values)
    finish(writer)


def named_tensors(
    model: Any, outer: dict[str, str] = OUTER
) -> tuple[dict[str, np.ndarray], list[tuple[str, str, np.ndarray]]]:
    """Tensors of a model of `transformers` by their names in a file: those outside the layers, and
    those of experts. And the other ones: the name of the block, what follows the layer in the
    model's name, and the tensor."""
    found, others = {}, []
    for name, parameter in model.state_dict().items():
        tensor = parameter.numpy()
        if name in outer:
            found[outer[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}."
        if rest.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(tensor, 2, 1), strict=True):
                found[f"{block}ffn_{part}_exps.weight"] = half
        elif rest.endswith("experts.down_proj"):
            found[f"{block}ffn_down_exps.weight"] = tensor
        else:
            others.append((block, rest, tensor))
    return found, others


def one_bit(matrix: np.ndarray) -> np.ndarray:
    """A matrix in Q1_0, which the package `gguf` does not write: the mean magnitude of 128 numbers,
    and their signs."""
    blocks = matrix.reshape(-1, 128)
    scales = np.abs(blocks).mean(1, keepdims=True).astype(np.float16).view(np.uint8)
    signs = np.packbits(blocks >= 0, axis=1, bitorder="little")
    return np.concatenate((scales, signs), 1).reshape(len(matrix), -1)


def two_bits(matrix: np.ndarray) -> np.ndarray:
    """A matrix in Q2_0: half the largest magnitude of 64 numbers, and the multiples of it, of -1 to
    2, to which they are rounded."""
    blocks = matrix.reshape(-1, 64)
    scales = (np.abs(blocks).max(1, keepdims=True) / 2).astype(np.float16)
    codes = (np.clip(np.rint(blocks / scales), -1, 2) + 1).astype(np.uint8)
    four = (codes.reshape(-1, 16, 4) << np.array([0, 2, 4, 6], np.uint8)).sum(2, dtype=np.uint8)
    return np.concatenate((scales.view(np.uint8), four), 1).reshape(len(matrix), -1)


#: Formats that the package `gguf` does not write: a function that does, their codes, and the
#: numbers in a block of 18 bytes.
FEW_BITS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int, int]] = {
    "Q1_0": (one_bit, 41, 128),
    "Q2_0": (two_bits, 42, 64),
}


def plain(tensor: np.ndarray | Weight) -> np.ndarray:
    return dequantize(tensor) if isinstance(tensor, Weight) else tensor.astype(np.float32)


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "use_sliding_window": False}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_scaling": None, "attention_bias": False},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "attention_bias": False},
    "qwen3": {"model_type": "qwen3", "head_dim": HEAD},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1]},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 1.0, "sliding_window": None},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention"] * 3,
    },
}


def patched(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new) and whole.count(old) >= 1
    return whole.replace(old, new)


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def pack(codes: np.ndarray, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Any:
    """Codes packed into int32 along `dim`; field i of a word takes entry `order[i]`."""
    count = 32 // bits
    shape = (*codes.shape[:dim], -1, count, *codes.shape[dim + 1 :])
    fields = codes.astype(np.uint32).reshape(shape)
    positions = order or tuple(range(count))
    words = [fields.take(positions[i], dim + 1) << np.uint32(bits * i) for i in range(count)]
    return np.bitwise_or.reduce(words).view(np.int32)


def grouped(bits: int, centred: bool, act_order: bool = False) -> tuple[np.ndarray, ...]:
    """Codes `[in, out]`, scales and zeros `[groups, out]`, the group of each input, exact
    weights."""
    generator = np.random.default_rng(bits)
    codes = generator.integers(0, 1 << bits, (128, 24))
    scales = (generator.random((2, 24)) * 0.02 + 0.001).astype(np.float16)
    zeros = np.full((2, 24), 1 << (bits - 1))
    if not centred:
        zeros = generator.integers(1, 1 << bits, (2, 24))
    groups = np.arange(128) // 64
    if act_order:
        groups = groups[generator.permutation(128)]
    exact = (scales.astype(np.float64)[groups] * (codes - zeros[groups])).T
    return codes, scales, zeros, groups, exact


GPTQ_CASES = [
    (4, True, False, "Q4_0"),
    (4, False, False, "Q4_1"),
    (8, True, False, "Q8_0"),
    (8, False, False, "F16"),
    (4, True, True, "Q4_0"),
    (4, False, True, "Q4_1"),
    (8, True, True, "Q8_0"),
    (8, False, True, "F16"),
]

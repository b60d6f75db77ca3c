"""Folders of random weights in NF4 and FP4, which GGUF lacks, as bitsandbytes stores them, for
`anydecode bench shapes`.

All matrices are in the format, also the embedding and the head, which published folders have in 16
bits. So a pass differs from one over a GGUF file of the same shape in the products alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from anydecode.benchmarks.shape_sizes import (
    BEGIN,
    END,
    MERGE,
    STD,
    Shape,
    matrices,
    norms,
    token_names,
)
from anydecode.kernels.formats import BITSANDBYTES_VALUES
from anydecode.models.loading.gguf_names import layer_names, outer_names

FORMATS = tuple(BITSANDBYTES_VALUES)
_RUN = 64  # weights with the same scale
_ARCHITECTURE = "llama"


def random_module(
    format: str, rows: int, columns: int, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """The tensors of a module of random weights with the standard deviation `STD`, by their names
    in it."""
    table, kind = BITSANDBYTES_VALUES[format], format.lower()
    scales = STD / table.std() * generator.uniform(0.9, 1.1, rows * columns // _RUN)
    state = {
        "quant_type": kind, "blocksize": _RUN, "dtype": "bfloat16", "shape": [rows, columns],
    }  # fmt: skip
    return {
        "weight": generator.integers(0, 256, (rows * columns // 2, 1), np.uint8),
        "weight.absmax": scales.astype(np.float32),
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }


def write_folder(folder: Path, shape: Shape, format: str, seed: int = 0) -> int:
    """Write a model without experts; return the bytes of codes and scales. Each layer has a file of
    its own, of which one at a time is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    sizes = matrices(shape)
    parts: dict[str, list[str]] = {}
    for name in (*sizes, *norms(shape)):
        layer = name.split(".")[1] if name.startswith("blk.") else "outside"
        parts.setdefault(f"layer-{layer}.safetensors", []).append(name)
    files: dict[str, str] = {}
    total = 0
    for file, names in parts.items():
        tensors: dict[str, np.ndarray] = {}
        for name in names:
            module = _module(name)
            if name not in sizes:
                tensors[f"{module}.weight"] = np.ones(shape.hidden, np.float32)
                continue
            rows, columns = sizes[name]
            stored = random_module(format, rows, columns, generator)
            total += stored["weight"].nbytes + stored["weight.absmax"].nbytes
            tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(_config(shape, format)))
    _write_tokenizer(folder, shape.vocabulary)
    return total


def _module(name: str) -> str:
    """The module of a matrix or a norm of `shape_sizes`."""
    if not name.startswith("blk."):
        return outer_names(_ARCHITECTURE)[name]
    _, layer, kind = name.split(".")
    return f"model.layers.{layer}.{layer_names(_ARCHITECTURE)[kind]}"


def _config(shape: Shape, format: str) -> dict[str, Any]:
    return {
        "model_type": _ARCHITECTURE, "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "bos_token_id": BEGIN, "eos_token_id": END,
        "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True,
            "bnb_4bit_quant_type": format.lower(),
        },
    }  # fmt: skip


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokens = token_names(vocabulary)
    ids = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[id], special=True) for id in (BEGIN, END)])
    tokenizer.save(str(folder / "tokenizer.json"))

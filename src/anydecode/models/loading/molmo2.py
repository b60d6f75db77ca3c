"""Converts the names of Molmo 2's language model, and the order of the rows of its MLPs, to the
Hugging Face layout of Qwen3."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.families.values import int_value
from anydecode.models.loading.lazy import Reader

_PREFIX = "model.transformer."
#: The embeddings of the tokens that texts have, and those of images' tokens.
_EMBEDDINGS = (f"{_PREFIX}wte.embedding", f"{_PREFIX}wte.new_embedding")
_OUTER = {"ln_f.weight": "norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "self_attn.att_proj": "self_attn.qkv_proj",
    "self_attn.attn_out": "self_attn.o_proj",
    "mlp.ff_out": "mlp.down_proj",
}
_LAYER = re.compile(r"blocks\.(\d+)\.([\w.]+)\.(weight|bias)")


def is_molmo2(config: dict[str, Any], readers: dict[str, Reader]) -> bool:
    """Whether a checkpoint is written in this layout."""
    is_own = config.get("model_type") == "molmo2_text"
    return is_own and any(name.startswith(_PREFIX) for name in readers)


def to_hf_layout(config: dict[str, Any], readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors of the language model in the Hugging Face layout."""
    result = {name: reader for name, reader in readers.items() if name.startswith("lm_head.")}
    embeddings = [readers[name] for name in _EMBEDDINGS if name in readers]
    if embeddings:
        vocab = int_value(config, "vocab_size", 151936)
        result["model.embed_tokens.weight"] = partial(_first_rows, embeddings, vocab)
    for name, reader in readers.items():
        rest = name.removeprefix(_PREFIX)
        layer = _LAYER.fullmatch(rest)
        if rest == name or (layer is None and rest not in _OUTER):
            continue
        if layer is None:
            result[f"model.{_OUTER[rest]}"] = reader
            continue
        block = f"model.layers.{layer[1]}"
        if layer[2] == "mlp.ff_proj":  # up before gate
            for part, half in (("up", 0), ("gate", 1)):
                found = partial(_half, reader, name, half)
                result[f"{block}.mlp.{part}_proj.{layer[3]}"] = found
        else:
            result[f"{block}.{_INNER.get(layer[2], layer[2])}.{layer[3]}"] = reader
    return result


def _first_rows(embeddings: list[Reader], size: int) -> np.ndarray:
    """`transformers` 5.23 saves the two embeddings as halves of both."""
    first = np.asarray(embeddings[0]())
    if len(first) >= size:
        return first
    return np.concatenate([first, *(np.asarray(reader()) for reader in embeddings[1:])])[:size]


def _half(reader: Reader, name: str, half: int) -> np.ndarray:
    tensor = np.asarray(reader())
    if len(tensor) % 2:
        raise CheckpointError(f"tensor {name} has {len(tensor)} rows, not those of two matrices")
    return np.split(tensor, 2)[half]

"""Mixtures of K formats, by the names of llama.cpp: matrices whose errors change a model's outputs
more have more bits. The rules are those of `llama-quantize`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Mix(NamedTuple):
    """A mixture: the format of most matrices, and its code in `general.file_type`."""

    base: str
    code: int


MIXES = {
    "Q3_K_S": Mix("Q3_K", 11),
    "Q3_K_M": Mix("Q3_K", 12),
    "Q3_K_L": Mix("Q3_K", 13),
    "Q4_K_S": Mix("Q4_K", 14),
    "Q4_K_M": Mix("Q4_K", 15),
    "Q5_K_S": Mix("Q5_K", 16),
    "Q5_K_M": Mix("Q5_K", 17),
}
_MATRIX = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|attn_kv_b|attn_k|attn_output|ffn_down)\b.*")
_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")


def mixed_formats(
    name: str, tensors: Collection[str], metadata: Mapping[str, Any]
) -> dict[str, str]:
    """The formats of the tensors that have more bits than the base of the mixture `name`.

    Args:
        name: One of `MIXES`.
        tensors: The names of a GGUF file's tensors.
        metadata: Its metadata, of which the numbers of layers, heads and experts are read.
    """
    architecture = metadata.get("general.architecture")

    def number(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else 0

    found = [match for match in map(_MATRIX.fullmatch, tensors) if match]
    values = sorted((match for match in found if match[2] in _VALUES), key=_layer)
    num_layers, has_eight = number("block_count"), number("expert_count") == 8
    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    is_70b = num_layers == 80 and 0 < kv_heads < heads  # their values are shared by many heads
    formats = {}
    for match in found:
        if match in values:
            format = _of_values(name, values.index(match), len(values))
            if is_70b and (format or MIXES[name].base) in ("Q3_K", "Q4_K"):
                format = "Q5_K"
            format = "Q8_0" if has_eight else format
        elif match[2] == "attn_k":
            format = "Q8_0" if has_eight else None
        elif match[2] == "attn_output":
            format = {"Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(name)
            if has_eight:
                format = "Q5_K" if name in ("Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M") else None
        else:
            format = _of_down(name, _layer(match), num_layers)
        if format is not None:
            formats[match[0]] = format
    return formats


def _layer(match: re.Match[str]) -> int:
    return int(match[1])


def _has_more_bits(index: int, count: int) -> bool:
    """The first and the last eighth, and every third between them."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _of_values(name: str, index: int, count: int) -> str | None:
    """The format of the matrix of values number `index` of `count`; None: the base."""
    if name == "Q3_K_M":
        return "Q5_K" if index < 2 else "Q4_K"
    if name in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _has_more_bits(index, count) else None
    return "Q5_K" if name == "Q3_K_L" or (name == "Q4_K_S" and index < 4) else None


def _of_down(name: str, layer: int, count: int) -> str | None:
    """The format of the last matrix of a layer's MLP; None: the base."""
    if name == "Q3_K_M":
        return "Q5_K" if layer < count // 16 else "Q4_K"
    if name in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _has_more_bits(layer, count) else None
    return "Q5_K" if name == "Q3_K_L" or (name == "Q4_K_S" and layer < count // 8) else None

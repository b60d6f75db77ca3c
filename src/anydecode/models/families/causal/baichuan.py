"""Baichuan and Baichuan 2 (Yang et al., 2023, arXiv:2309.10305): those of 7 billion parameters have
a rotary position embedding, those of 13 linear biases."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full, rope_unless_alibi
from anydecode.models.families.values import Config, int_value

_LONGEST = "max_position_embeddings"
#: The vocabulary of Baichuan 2, whose code is what says that the rows of the head are normed.
_SECOND = 125_696


def _options(config: Config) -> dict[str, Any]:
    """What no key of a config says. The code with linear biases reads `model_max_length`."""
    if "alibi" in config:  # of a GGUF file
        return {}
    has_alibi = config.get(_LONGEST) is None
    return {
        "alibi": has_alibi,
        _LONGEST: int_value(config, "model_max_length" if has_alibi else _LONGEST),
        "has_normed_head": config.get("vocab_size") == _SECOND,
    }


FAMILIES = {
    "baichuan": Family(
        ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        all_full,
        has_alibi=True,
        rope_layers=rope_unless_alibi,
        derived=_options,
        names={"self_attn.qkv_proj": "self_attn.W_pack"},
    )
}

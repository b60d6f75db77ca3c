"""Qwen3.8 (Alibaba, 2026; Qwen4-Exp), its language model: the gated delta rule in three of four
layers, in the others attention to blocks of positions that an indexer selects, experts, streams of
hidden states that sublayers read through gates, and embeddings of n-grams.

These embeddings are a layer of their own here, before the one that they are stored with.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.ngrams import NGRAMS
from anydecode.models.families.patterns import FULL
from anydecode.models.families.values import (
    Config,
    int_value,
    list_value,
    num_layers,
    value_or,
)
from anydecode.models.limits import MAX_TOKENS, refusal

_LINEAR = "linear_attention"


def _layer_types(config: Config) -> list[str]:
    """Attention in every fourth layer."""
    size = int_value(config, "full_attention_interval", 4)
    return [_LINEAR if (layer + 1) % size else FULL for layer in range(num_layers(config))]


def _layers(config: Config) -> dict[str, Any]:
    """The kinds of layers, and the keys of the indexer. Configs of `transformers` call attention
    "indexed_attention"."""
    if "stored_layers" in config:  # derived before
        return {}
    types = list_value(config, "layer_types", str) or _layer_types(config)
    count, ids = num_layers(config), sorted(set(list_value(config, "ple_layer_ids", int) or []))
    if ids and not 1 <= ids[0] <= ids[-1] <= count:
        raise refusal("ple_layer_ids", ids, f"numbers from 1 to {count}")
    found, stored = [], []
    for layer, kind in enumerate(types[:count]):
        if layer + 1 in ids:
            found.append(NGRAMS)
            stored.append(layer)
        found.append(FULL if kind == "indexed_attention" else kind)
        stored.append(layer)
    int_value(config, "indexer_kv_heads", 1, high=1)
    return {
        "num_hidden_layers": len(found),
        "layer_types": found,
        "stored_layers": stored,
        "indexer_types": ["full" if kind == FULL else "none" for kind in found],
        "index_n_heads": int_value(config, "indexer_n_heads"),
        "index_head_dim": int_value(config, "indexer_head_dim"),
        "index_topk": int_value(config, "indexer_budget"),
        "index_block_size": int_value(config, "indexer_compress_ratio"),
        "has_block_keys": True,
        "has_mean_keys": True,
        "output_gate_type": value_or(
            config, "output_gate_type", value_or(config, "hidden_act", "silu")
        ),
        **(_end_token(config) if ids else {}),
    }


def _end_token(config: Config) -> dict[str, int]:
    """The token that n-grams do not cross: the first that ends a text. GGUF files have it under a
    key of its own."""
    end = value_or(config, "ple_eos_token_id", config.get("eos_token_id"))
    if isinstance(end, list) and end:
        end = end[0]
    return {"ple_end_token": int_value({"eos_token_id": end}, "eos_token_id", None, 0, MAX_TOKENS)}


def _stored_name(config: Config, name: str) -> str:
    """The name of a tensor or module in checkpoints, whose layers have the n-grams before them."""
    start, _, rest = name.partition(".")
    number, dot, part = rest.partition(".")
    if start != "layers" or not number.isdigit():
        return name
    stored, layer = config["stored_layers"], int(number)
    at = stored[layer] if layer < len(stored) else layer - len(stored) + stored[-1] + 1
    return f"layers.{at}{dot}{part}"


FAMILIES = {
    "qwen4_exp_text": family_like(
        "qwen3_5_moe_text",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        model_types=("qwen4_exp",),
        norms="none",
        has_final_norm=False,
        has_indexer=True,
        has_stream_gates=True,
        derived=_layers,
        stored_name=_stored_name,
        defaults={
            "head_dim": 256,
            "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-6,
            "hc_count": 4,
            "hc_lowrank": 320,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 8,
            "norm_topk_prob": True,
        },
    )
}

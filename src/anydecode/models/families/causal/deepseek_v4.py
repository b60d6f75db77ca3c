"""DeepSeek-V4 (DeepSeek-AI, 2026).

Rows attend to a window of positions, whose only key is their value, and to entries that stand for 4
or 128 positions each; an indexer selects among the former. Sublayers have hyper-connections, and
the experts of the first layers are those of a row's token.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.shared_key import ALL, SELECTED, SLIDING
from anydecode.models.families.values import (
    Config,
    int_value,
    list_value,
    mapping_value,
    num_layers,
    optional_number,
    value_or,
)
from anydecode.models.limits import refusal

#: The numbers of positions of the entries of published models.
_RATES = {SELECTED: 4, ALL: 128}
_HASHED = "hash_moe"


def _layers(config: Config) -> dict[str, Any]:
    """The kinds of layers, their entries and experts, and the two rotary embeddings."""
    count = num_layers(config)
    rates = {**_RATES, **mapping_value(config, "compress_rates")}
    for kind, key in ((SELECTED, "compress_rate_csa"), (ALL, "compress_rate_hca")):
        rates[kind] = int_value(config, key, rates[kind])
    kinds = _kinds(config, count)
    return {
        "entry_kinds": kinds,
        "compress_rates": rates,
        "layer_types": ["main" if kind == SLIDING else "compress" for kind in kinds],
        "rope_parameters": _rope_parameters(config),
        "per_layer_config": _token_experts(config, count),
    }


def _kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer: those of a list, or by numbers of positions, or the usual ones."""
    known = list_value(config, "entry_kinds", str) or list_value(config, "layer_types", str)
    if known is not None:
        return known
    ratios = list_value(config, "compress_ratios", int)
    if ratios is None:
        return [SELECTED if layer >= 2 and layer % 2 else ALL for layer in range(count)]
    names = {0: SLIDING, 4: SELECTED, 128: ALL}
    wrong = [ratio for ratio in ratios if ratio not in names]
    if wrong:
        raise refusal("compress_ratios", wrong[0], "0, 4 or 128")
    return [names[ratio] for ratio in ratios]


def _token_experts(config: Config, count: int) -> dict[str, Any]:
    """The layers whose experts are those of the row's token."""
    kinds = list_value(config, "mlp_layer_types", str)
    if kinds is None:
        kinds = [_HASHED] * int_value(config, "num_hash_layers", 3, low=0)
    wrong = [kind for kind in kinds if kind not in (_HASHED, "moe")]
    if wrong:
        raise refusal("mlp_layer_types", wrong[0], f"{_HASHED} or moe")
    own = {"has_token_experts": True, "use_expert_bias": False}
    return {str(layer): own for layer, kind in enumerate(kinds[:count]) if kind == _HASHED}


def _rope_parameters(config: Config) -> dict[str, Any]:
    """Those of layers without entries, "main", and with entries, "compress"."""
    given = mapping_value(config, "rope_parameters")
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        return given
    share = optional_number(config, "partial_rotary_factor")
    if share is None:
        size = int_value(config, "qk_rope_head_dim", 64)
        share = size / int_value(config, "head_dim")
    scaling = {**given, **mapping_value(config, "rope_scaling")}
    main = {"rope_theta": value_or(config, "rope_theta", 1e4), "partial_rotary_factor": share}
    theta = value_or(config, "compress_rope_theta", 1.6e5)
    compress = {**scaling, "rope_theta": theta, "partial_rotary_factor": share}
    if (scaling.get("rope_type") or scaling.get("type")) == "yarn":
        compress.setdefault("attention_factor", 1.0)
    return {"main": main, "compress": compress}


FAMILIES = {
    "deepseek_v4": Family(
        ("DeepseekV4ForCausalLM",),
        all_full,
        qk_norm="plain",
        has_sinks=True,
        has_partial_rotary=True,
        has_shared_key=True,
        has_hyper_connections=True,
        has_limited_swiglu=True,
        query_rank="q_lora_rank",
        derived=_layers,
        defaults={
            "head_dim": 512,
            "num_key_value_heads": 1,
            "sliding_window": 128,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
        },
        moe=MixtureOfExperts(
            scoring=("sqrtsoftplus", "sigmoid", "softmax"),
            has_selection_bias=True,
            shared_module="shared_experts",
        ),
    )
}

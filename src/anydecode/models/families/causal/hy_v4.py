"""Hy4 (Tencent, 2026): DeepSeek-V3.2 with gates and sinks of attention, hyper-connections that mix
no streams, and a limit of the activation of routed experts.

Rotary pairs are next to each other in the published checkpoints. `transformers` rotates their rows
as if these were not; a config with `rope_interleave` and `indexer_rope_interleave` false is read
so.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, indexer_types, listed_dense_layers
from anydecode.models.families.values import Config, bool_value, list_value, num_layers
from anydecode.models.limits import refusal

_SPARSE = ("indexed_attention", "sparse_attention", "deepseek_sparse_attention")


def _layers(config: Config) -> dict[str, Any]:
    """The kinds of layers. Without a list, every fourth layer behind the second, and both of the
    first, have an indexer."""
    count, types = num_layers(config), list_value(config, "layer_types", str)
    if types is not None and "has_index_eps" not in config:
        for layer, kind in enumerate(types[:count]):
            if kind not in _SPARSE:
                raise refusal(f"layer_types[{layer}]", kind, f"one of {_SPARSE}")
    if not bool_value(config, "enable_ihc", True):
        raise refusal("enable_ihc", False, "true")
    given = list_value(config, "indexer_types", str)
    if given is None:
        kinds = ["full" if layer < 1 or layer % 4 == 1 else "shared" for layer in range(count)]
    else:
        kinds = indexer_types(config)
    return {
        "layer_types": [FULL] * count,
        "indexer_types": kinds,
        "indexer_rope_last": True,
        "has_index_eps": True,
        "hc_sinkhorn_iters": 1,
        **listed_dense_layers(config),
    }


FAMILIES = {
    "hy_v4": family_like(
        "deepseek_v3",
        "HYV4ForCausalLM",
        derived=_layers,
        has_indexer=True,
        has_sinks=True,
        attention_gate="sigmoid",
        has_hyper_connections=True,
        has_limited_experts=True,
        interleaved_rope=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "indexer_rope_interleave": True,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 16,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "swiglu_limit": 10.0,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
        },
    )
}

"""ZAYA1 (Zyphra, 2025): compressed convolutional attention (arXiv:2510.04476), and experts whose
routers read the states of those before them."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, all_full
from anydecode.models.families.values import Config, int_value, list_value, mapping_value
from anydecode.models.limits import refusal

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING, FULL: FULL, SLIDING: SLIDING}
_BASES = {FULL: 5e6, SLIDING: 1e4}


def _layers(config: Config) -> dict[str, Any]:
    """The usual names of the layers' types, which have rotary embeddings of their own."""
    for key in ("cca_time0", "cca_time1"):
        if int_value(config, key, 2) != 2:
            raise refusal(key, config[key], "2")
    types = list_value(config, "layer_types", str)
    for kind in types or ():
        if kind not in _KINDS:
            raise refusal("layer_types", kind, "hybrid or hybrid_sliding")
    own = mapping_value(config, "rope_parameters")
    ropes = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
        for kind, base in _BASES.items()
    }
    for name, kind in _KINDS.items():
        if isinstance(own.get(name), dict):
            ropes[kind] = own[name]
    return {
        "layer_types": None if types is None else [_KINDS[kind] for kind in types],
        "rope_parameters": ropes,
        "num_skip_experts": 1,
    }


FAMILIES = {
    "zaya": Family(
        ("ZayaForCausalLM",),
        all_full,
        derived=_layers,
        has_partial_rotary=True,
        is_convolved=True,
        has_sum_biases=True,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "router_hidden_size": 256,
            "tie_word_embeddings": True,
        },
        moe=MixtureOfExperts(
            is_normalised=False,
            has_selection_bias=True,
            identity_experts="num_skip_experts",
            has_router_states=True,
        ),
    )
}

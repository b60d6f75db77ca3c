"""Ling and Ring (Ling team, 2025, arXiv:2503.05139), and their second versions (arXiv:2510.22115).
Configs of both have the model type bailing_moe; their classes differ. Sarvam 30B (Sarvam AI, 2026)
is the second version under a name of its own."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import ConfigError

_SECOND = "BailingMoeV2ForCausalLM"
#: The config keys and names of modules, those of LLaDA2 too.
KEYS = {
    "num_shared_experts": ("n_shared_experts",),
    "score_function": ("scoring_func",),
    "moe_router_enable_expert_bias": ("use_expert_bias",),
}
_SECOND_DEFAULTS = {"use_qk_norm": True, "rms_norm_eps": 1e-6}
NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.q_proj": "attention.query_key_value.query",
    "self_attn.k_proj": "attention.query_key_value.key",
    "self_attn.v_proj": "attention.query_key_value.value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}


def check_options(config: Config) -> dict[str, Any]:
    """Refuse options that no published model has."""
    for key in ("norm_head", "norm_softmax", "use_bias", "use_qkv_bias"):
        if bool_value(config, key):
            raise ConfigError(
                f"{key}=true is not supported in a {config['model_type']} config; allowed is false"
            )
    return {}


FAMILIES = {
    "bailing_moe": family_like(
        "glm4_moe",
        "BailingMoeForCausalLM",
        qk_norm=None,
        has_partial_rotary=False,
        derived=check_options,
        moe=MixtureOfExperts(shared_module="shared_experts"),
        keys=KEYS,
        names=NAMES,
        defaults={"rms_norm_eps": 1e-6},
    ),
    "bailing_moe_v2": family_like(
        "glm4_moe",
        _SECOND,
        is_own=lambda config: _SECOND in (config.get("architectures") or ()),
        derived=check_options,
        keys=KEYS,
        names=NAMES,
        defaults={**_SECOND_DEFAULTS, "partial_rotary_factor": 0.5},
    ),
    "sarvam_moe": family_like(
        "glm4_moe",
        "SarvamMoEForCausalLM",
        derived=check_options,
        keys=KEYS,
        names=NAMES,
        defaults={
            **_SECOND_DEFAULTS,
            "partial_rotary_factor": 1.0,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
}

"""LLaDA2.0 and 2.1, mini and flash ("LLaDA2.0: Scaling Up Diffusion Language Models to 100B",
arXiv:2512.15745), and LLaDA2.2, whose blocks choose the experts that their tokens choose from.

Of LLaDA2.2, the config has `expert_capacity`.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Denoising, Family, MixtureOfExperts
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import ConfigError


def _checked(config: Config) -> dict[str, Any]:
    """Refuse what the supported models do not have."""
    for key in ("norm_head", "use_bias", "use_qkv_bias"):
        if bool_value(config, key):
            raise ConfigError(f"{key}=true is not supported in a llada2_moe config")
    return {}


def _family(
    models: str, decoder: str, *, is_per_block: bool = False, tokens: tuple[str, ...] = ()
) -> Family:
    return diffusion_family(
        "glm4_moe",
        "LLaDA2MoeModelLM",
        denoising=Denoising(
            models,
            context="blocks",
            block_size="block_size",
            default_block_size=32,
            mask_token=156895,
            decoder=decoder,
            tokens=tokens,
        ),
        model_types=("llada2_moe",),
        is_own=lambda config: bool(config.get("expert_capacity")) == is_per_block,
        derived=_checked,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            is_per_block=is_per_block,
        ),
        keys={
            "num_shared_experts": ("n_shared_experts",),
            "score_function": ("scoring_func",),
            "moe_router_enable_expert_bias": ("use_expert_bias",),
        },
        names={
            "embed_tokens": "word_embeddings",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.q_proj": "attention.query_key_value.query",
            "self_attn.k_proj": "attention.query_key_value.key",
            "self_attn.v_proj": "attention.query_key_value.value",
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
        },
        defaults={"use_qk_norm": True, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5},
    )


FAMILIES = {
    "llada2_moe": _family("LLaDA2.0, LLaDA2.1", "sdar:threshold=0.95"),
    "llada2_2_moe": _family(
        "LLaDA2.2",
        "levenshtein-editing:delete={delete_token_id},split={split_token_id}",
        is_per_block=True,
        tokens=("delete_token_id", "split_token_id"),
    ),
}

"""LLaDA-MoE (Zhu et al., "LLaDA-MoE: A Sparse MoE Diffusion Language Model", 2025).

The configs have LLaDA's model type. The published code computes a softmax over all experts and
normalises no weights, whatever the config says.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Denoising, MixtureOfExperts
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.values import Config, bool_value, list_value, num_layers
from anydecode.models.limits import ConfigError, refusal


def _layers(config: Config) -> dict[str, Any]:
    """Which layers have experts, and the keys that the published code ignores."""
    if bool_value(config, "moe_router_enable_expert_bias"):
        raise ConfigError(
            "moe_router_enable_expert_bias=true is not supported in a llada_moe config"
        )
    if config.get("shared_expert_intermediate_size"):
        raise ConfigError("shared experts are not supported in a llada_moe config")
    flags = config.get("moe_layer_freq")
    dense: list[int] = []
    if isinstance(flags, list):
        flags = list_value(config, "moe_layer_freq", int) or []
        if len(flags) < num_layers(config):
            raise refusal("moe_layer_freq", flags, "one number per layer")
        dense = [layer for layer, flag in enumerate(flags) if not flag]
    elif flags not in (None, 1):
        raise refusal("moe_layer_freq", flags, "1, or a list with one number per layer")
    return {
        "moe_layer_freq": None,
        "mlp_only_layers": dense,
        "intermediate_size": config.get("dense_intermediate_size"),
        "norm_topk_prob": False,
        "routed_scaling_factor": None,
        "use_qk_norm": bool_value(config, "qk_layernorm"),
    }


FAMILIES = {
    "llada_moe": diffusion_family(
        "qwen3_moe",
        "LLaDAMoEModelLM",
        "LLaDAMoEModel",
        model_types=("llada", "lladamoe"),
        is_own=lambda config: bool(
            config.get("num_experts") and config.get("expert_intermediate_size")
        ),
        denoising=Denoising("LLaDA-MoE-7B-A1B", mask_token=156895),
        derived=_layers,
        moe=MixtureOfExperts("expert_intermediate_size", is_normalised=False),
        defaults={},
    )
}

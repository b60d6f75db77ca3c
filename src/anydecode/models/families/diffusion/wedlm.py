"""WeDLM (Liu et al., "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention",
arXiv:2512.22737): causal models that predict mask tokens after the visible tokens.

The layers are those of Qwen2.5 or, with `qk_norm`, of Qwen3. Biases are read if they are stored.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "wedlm": diffusion_family(
        "qwen2",
        "WeDLMForCausalLM",
        causal=True,
        model_types=("WeDLM",),
        denoising=Denoising("WeDLM-7B", context="order", mask_token=151665),
        derived=lambda config: {"attention_bias": False},
        qkv_bias=False,
    ),
    "wedlm_qwen3": diffusion_family(
        "qwen3",
        "WeDLMForCausalLM",
        causal=True,
        model_types=("wedlm", "WeDLM"),
        is_own=lambda config: bool(config.get("qk_norm")),
        denoising=Denoising("WeDLM-8B", context="order", mask_token=151665),
        derived=lambda config: {"attention_bias": False},
    ),
}

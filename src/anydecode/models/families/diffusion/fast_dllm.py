"""Fast-dLLM v2 (Wu et al., "Fast-dLLM v2: Efficient Block-Diffusion LLM", arXiv:2509.26328)."""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "fast_dllm_qwen": diffusion_family(
        "qwen2",
        "Fast_dLLM_QwenForCausalLM",
        model_types=("Fast_dLLM_Qwen",),
        denoising=Denoising(
            "Fast-dLLM v2 1.5B, 7B",
            context="blocks",
            shift=1,
            block_size="bd_size",
            default_block_size=32,
            mask_token=151665,
            decoder="fast-dllm-v2",
        ),
    )
}

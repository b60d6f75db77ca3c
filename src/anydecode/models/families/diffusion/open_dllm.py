"""Open-dLLM (Open-dCoder-0.5B), whose configs are those of Qwen2: only the user can say that a
checkpoint is one, `LLM(..., family="open_dllm")`."""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "open_dllm": diffusion_family("qwen2", denoising=Denoising("Open-dCoder-0.5B", shift=1))
}

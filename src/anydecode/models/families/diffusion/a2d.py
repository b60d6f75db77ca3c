"""Causal models that the dLLM library converted to diffusion models."""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    f"a2d-{like}": diffusion_family(
        like,
        f"A2D{name}LMHeadModel",
        denoising=Denoising(f"Tiny-A2D of {name}", block_size=block_size),
    )
    # The converter of this library writes blocks for Llama only.
    for like, name, block_size in (
        ("llama", "Llama", "block_size"),
        ("qwen2", "Qwen2", None),
        ("qwen3", "Qwen3", None),
    )
}

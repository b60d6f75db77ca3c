"""DiffLlama (2024): Llama with differential attention (Ye et al., arXiv:2410.05258)."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "diffllama": family_like(
        "llama",
        "DiffLlamaForCausalLM",
        is_differential=True,
        has_distant_pairs=True,
        names={"self_attn.difference": "self_attn"},
        defaults={"rms_norm_eps": 1e-5},
    )
}

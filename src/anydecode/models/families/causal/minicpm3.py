"""MiniCPM3 (OpenBMB, 2024): latent attention with the factors of MiniCPM."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import minicpm_scales
from anydecode.models.families.values import Config, int_value


def _value_size(config: Config) -> dict[str, Any]:
    """The size of a value head, which published configs leave out."""
    usual = int_value(config, "hidden_size") // int_value(config, "num_attention_heads")
    return {"v_head_dim": int_value(config, "v_head_dim", max(1, usual))}


FAMILIES = {
    "minicpm3": family_like(
        "deepseek_v3",
        "MiniCPM3ForCausalLM",
        moe=None,
        interleaved_rope=False,
        scales=minicpm_scales,
        derived=_value_size,
        defaults={
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    )
}

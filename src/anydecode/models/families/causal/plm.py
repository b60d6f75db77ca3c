"""PLM (Deng et al., 2025, arXiv:2503.12167): latent attention, and MLPs of squared ReLUs."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "plm": family_like(
        "deepseek_v3",
        "PLMForCausalLM",
        moe=None,
        mlp="plain",
        defaults={"hidden_act": "relu2", "tie_word_embeddings": True},
    )
}

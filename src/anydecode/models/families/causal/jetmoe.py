"""JetMoE (Shen et al., 2024, arXiv:2404.07413): experts of attention's queries and outputs, and of
the MLPs."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, int_value, value_or
from anydecode.models.limits import MAX_COUNT


def _sizes(config: Config) -> dict[str, Any]:
    """The number of heads, and the epsilons: those of the layers' norms are that of their class."""
    if "final_norm_eps" in config:
        return {}
    kv_heads = int_value(config, "num_key_value_heads", 16, high=MAX_COUNT)
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": int_value(config, "num_experts_per_tok") * kv_heads,
        "final_norm_eps": value_or(config, "rms_norm_eps", 1e-6),
        "rms_norm_eps": 1e-6,
    }


FAMILIES = {
    "jetmoe": Family(
        ("JetMoeForCausalLM",),
        all_full,
        derived=_sizes,
        keys={"kv_channels": ("head_dim",), "activation_function": ("hidden_act",)},
        defaults={
            "head_dim": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        moe=MixtureOfExperts("intermediate_size", by_logits=True),
        has_attention_experts=True,
    )
}

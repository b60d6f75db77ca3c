"""DeepSeekMoE (Dai et al., 2024, arXiv:2401.06066): the first DeepSeek with experts."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "deepseek": Family(
        ("DeepseekForCausalLM",),
        all_full,
        moe=MixtureOfExperts(
            is_normalised=False, shared_module="shared_experts", methods=("greedy",)
        ),
    )
}

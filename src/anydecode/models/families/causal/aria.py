"""The language model of Aria (Li et al., 2024, arXiv:2410.05993): Llama with experts."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "aria_text": Family(
        ("AriaTextForCausalLM", "AriaForConditionalGeneration"),
        all_full,
        moe=MixtureOfExperts(
            "intermediate_size", is_transposed=True, shared_module="shared_experts"
        ),
        keys={
            "moe_num_experts": ("num_experts",),
            "moe_topk": ("num_experts_per_tok",),
            "moe_num_shared_experts": ("n_shared_experts",),
        },
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2},
    )
}

"""dots.llm1 (Huo et al., 2025, arXiv:2506.05767)."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import sliding_from_layer

FAMILIES = {
    "dots1": Family(
        ("Dots1ForCausalLM",),
        sliding_from_layer,
        qk_norm="head",
        defaults={
            "sliding_window": 4096,
            "use_sliding_window": True,
            "max_window_layers": 62,
        },
        moe=MixtureOfExperts(
            is_normalised=False,
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
        ),
    )
}

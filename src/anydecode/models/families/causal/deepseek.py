"""DeepSeekMoE (Dai et al., 2024, arXiv:2401.06066), the first DeepSeek with experts, and the
language models of DeepSeek-OCR and DeepSeek-VL2-tiny, which have its attention too."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full, listed_dense_layers
from anydecode.models.families.values import Config


def _lacks_latents(config: Config) -> bool:
    """Whether a config of DeepSeek-V2's class has no latent attention."""
    return config.get("use_mla") is False


FAMILIES = {
    "deepseek": Family(
        ("DeepseekForCausalLM", "DeepseekV2ForCausalLM"),
        all_full,
        is_own=_lacks_latents,
        model_types=("deepseek_ocr2_text",),
        derived=listed_dense_layers,
        moe=MixtureOfExperts(
            is_normalised=False, shared_module="shared_experts", methods=("greedy",)
        ),
    )
}

"""LLaDA2.0 and 2.1, mini and flash ("LLaDA2.0: Scaling Up Diffusion Language Models to 100B",
arXiv:2512.15745), and LLaDA2.2, whose blocks choose the experts that their tokens choose from.

Of LLaDA2.2, the config has `expert_capacity`.
"""

from __future__ import annotations

from anydecode.models.families.causal.bailing_moe import KEYS, NAMES, check_options
from anydecode.models.families.family import Denoising, Family, MixtureOfExperts
from anydecode.models.families.like import diffusion_family


def _family(
    models: str,
    decoder: str,
    *,
    is_per_block: bool = False,
    edit_tokens: tuple[tuple[str, int], tuple[str, int]] | None = None,
) -> Family:
    return diffusion_family(
        "glm4_moe",
        "LLaDA2MoeModelLM",
        denoising=Denoising(
            models,
            context="blocks",
            block_size="block_size",
            default_block_size=32,
            mask_token=156895,
            decoder=decoder,
            edit_tokens=edit_tokens,
        ),
        model_types=("llada2_moe",),
        is_own=lambda config: bool(config.get("expert_capacity")) == is_per_block,
        derived=check_options,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            is_per_block=is_per_block,
        ),
        keys=KEYS,
        names=NAMES,
        defaults={"use_qk_norm": True, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5},
    )


FAMILIES = {
    "llada2_moe": _family("LLaDA2.0, LLaDA2.1", "sdar:threshold=0.95"),
    "llada2_2_moe": _family(
        "LLaDA2.2",
        "levenshtein-editing",
        is_per_block=True,
        # The numbers are those of SGLang for LLaDA2.2-flash.
        edit_tokens=(("delete_token_id", 156930), ("split_token_id", 156931)),
    ),
}

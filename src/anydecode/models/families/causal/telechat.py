"""TeleChat (TeleAI, 2024, arXiv:2401.03804) and TeleChat 2 (arXiv:2507.18013): Llama with biases
behind the sublayers; their layout is converted when they are loaded. TeleChat 3 (2025): Llama with
a variant of YaRN."""

from __future__ import annotations

from typing import Any

from anydecode.kernels import portable
from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, mapping_value, value_or
from anydecode.models.limits import number

_YARN = "telechat3-yarn"


def _own_yarn(config: Config) -> dict[str, Any]:
    """TeleChat 3: the factor of queries and keys grows with the context by 0.07 instead of 0.1."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = mapping_value(config, key)
        if _YARN not in (scaling.get("rope_type"), scaling.get("type")):
            continue
        factor = number("factor", scaling.get("factor"), 1.0, 1e6)
        own = number("attn_factor", value_or(scaling, "attn_factor", 1.0), 1e-6, 1e6)
        attention_factor = own * (0.07 * float(portable.log(factor)) + 1.0)
        yarn = {"type": "yarn", "rope_type": "yarn", "attention_factor": attention_factor}
        return {key: {**scaling, **yarn}}
    return {}


FAMILIES = {
    "telechat": family_like(
        "llama",
        "TeleChatForCausalLM",
        "TelechatForCausalLM",
        "TeleChat2ForCausalLM",
        model_types=("telechat2",),
        context_limit="training_seqlen",
    ),
    "telechat3": family_like("llama", "TeleChat3ForCausalLM", derived=_own_yarn),
}

"""GPT-NeoX Japanese (ABEJA, 2022): GPT-NeoX with sublayers in sequence, and without biases but in
the last attention; its layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "gpt_neox_japanese": family_like(
        "gpt_neox",
        "GPTNeoXJapaneseForCausalLM",
        is_parallel=False,
        defaults={"partial_rotary_factor": 1.0},
    )
}

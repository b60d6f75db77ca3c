"""GPT-BigCode: StarCoder (Li et al., 2023, arXiv:2305.06161) and SantaCoder, whose layout is
converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {"gpt_bigcode": family_like("gpt2", "GPTBigCodeForCausalLM")}

"""GPT-BigCode: StarCoder (Li et al., 2023, arXiv:2305.06161) and SantaCoder, whose layout is
converted when it is loaded."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.table import FAMILIES as TABLE

FAMILIES = {"gpt_bigcode": replace(TABLE["gpt2"], architectures=("GPTBigCodeForCausalLM",))}

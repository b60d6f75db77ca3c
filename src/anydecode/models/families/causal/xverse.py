"""XVERSE (2023), dense: Llama."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {"xverse": family_like("llama", "XverseForCausalLM")}

"""GLM-4-9B (GLM team, 2024, arXiv:2406.12793) and GLM-Edge, as `transformers` stores them."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {"glm": family_like("glm4", "GlmForCausalLM", norms="pre", names={})}

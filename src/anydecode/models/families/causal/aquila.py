"""Aquila and Aquila 2 (BAAI, 2023): Llama."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {"aquila": family_like("llama", "AquilaForCausalLM", "AquilaModel")}

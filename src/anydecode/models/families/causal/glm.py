"""GLM-4-9B (GLM team, 2024, arXiv:2406.12793) and GLM-Edge, as `transformers` stores them."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.table import FAMILIES as TABLE

FAMILIES = {
    "glm": replace(
        TABLE["glm4"], architectures=("GlmForCausalLM",), model_types=(), norms="pre", names={}
    )
}

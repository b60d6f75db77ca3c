"""CodeShell (Xie et al., 2024, arXiv:2403.15747): GPT-2 with a rotary position embedding and with
grouped queries; its layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "codeshell": family_like(
        "gpt2", "CodeShellForCausalLM", rope_layers=None, has_position_table=False
    )
}

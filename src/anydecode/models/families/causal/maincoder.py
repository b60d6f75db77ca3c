"""Maincoder (Maincode, 2025): Llama with norms of queries and keys behind the rotary embedding."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "maincoder": family_like(
        "llama",
        "MaincoderForCausalLM",
        qk_norm="head",
        norm_after_rope=True,
        interleaved_rope=True,
    )
}

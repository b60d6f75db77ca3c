"""Refact 1.6B (Small Magellanic Cloud AI, 2023): linear biases of attention, one key head, layer
norms without biases and gated MLPs, whose layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full, no_rope

FAMILIES = {
    "gpt_refact": Family(
        ("GPTRefactForCausalLM",),
        all_full,
        rope_layers=no_rope,
        has_alibi=True,
        norm="layer",
        defaults={"num_key_value_heads": 1, "layer_norm_eps": 1e-5},
    )
}

"""A.X K1 (SK Telecom, 2026): DeepSeek-V3 with a norm of the output of experts."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import listed_dense_layers
from anydecode.models.families.table import FAMILIES as TABLE

_MOE = TABLE["deepseek_v3"].moe
assert _MOE is not None

FAMILIES = {
    "axk1": family_like(
        "deepseek_v3",
        "AXK1ForCausalLM",
        derived=listed_dense_layers,
        # Published checkpoints have no biases of the router.
        moe=replace(_MOE, has_selection_bias=None, has_output_norm=True),
        names={"post_feedforward_layernorm": "post_mlp_layernorm"},
        other_names={"post_feedforward_layernorm": "mlp.post_mlp_layernorm"},
        defaults={"first_k_dense_replace": 1, "n_group": 8, "topk_group": 4},
    )
}

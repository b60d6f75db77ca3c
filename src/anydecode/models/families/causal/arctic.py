"""Arctic (Snowflake, 2024): Llama with an MLP behind the attention, and beside both, experts that
read the inputs of the layer."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import refusal


def _options(config: Config) -> dict[str, Any]:
    for key in ("parallel_attn_mlp_res", "use_residual"):
        if not bool_value(config, key, True):
            raise refusal(key, False, "true: experts in the place of the MLP are not supported")
    return {}


FAMILIES = {
    "arctic": Family(
        ("ArcticForCausalLM",),
        all_full,
        derived=_options,
        keys={"moe_layer_frequency": ("decoder_sparse_step",)},
        names={
            f"mlp.{part}_proj": f"block_sparse_moe.mlp.{name}"  # of layers without experts
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "decoder_sparse_step": 2},
        moe=MixtureOfExperts(
            "intermediate_size",
            shared_module="residual_mlp",
            shared_size="hidden_size",
            reads_inputs=True,
        ),
    )
}

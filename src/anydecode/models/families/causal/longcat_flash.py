"""LongCat-Flash (Meituan, 2025, arXiv:2509.01322): layers with two sublayers of latent attention,
and experts beside the first MLP whose output is added after the second one. Some experts return
their input.

Each layer is two here, with the names of `transformers` for their halves.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value, int_value, value_or
from anydecode.models.limits import MAX_LAYERS, refusal

_NORMS = ("input_layernorm", "post_attention_layernorm")
_SHARED = "mlp.shared_experts"


def _layers(config: Config) -> dict[str, Any]:
    """The numbers of layers and heads, and which layers have experts."""
    count = 2 * int_value(config, "num_layers", high=MAX_LAYERS // 2)
    if value_or(config, "zero_expert_type", "identity") != "identity":
        raise refusal("zero_expert_type", config["zero_expert_type"], "'identity'")
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        if not bool_value(config, key, True):
            raise refusal(key, False, "true")
    rotary = int_value(config, "qk_rope_head_dim")
    if value_or(config, "head_dim", rotary) != rotary:
        raise refusal("head_dim", config["head_dim"], f"{rotary}, qk_rope_head_dim")
    return {
        "num_hidden_layers": count,
        "mlp_only_layers": list(range(1, count, 2)),
        "norm_topk_prob": False,
    }


def _stored_name(config: Config, name: str) -> str:
    """The name of a tensor or module of layer 2 i or 2 i + 1 in checkpoints, where they are the
    halves of layer i."""
    start, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if start != "layers" or not number.isdigit():
        return name
    half, module = int(number) % 2, part.partition(".")[0]
    if module in ("self_attn", *_NORMS):
        part = f"{module}.{half}{part.removeprefix(module)}"
    elif part.startswith(_SHARED):
        part = f"mlps.0{part.removeprefix(_SHARED)}"
    elif half and module == "mlp":
        part = f"mlps.1{part.removeprefix(module)}"
    return f"layers.{int(number) // 2}.{part}".removesuffix(".")


FAMILIES = {
    "longcat_flash": Family(
        ("LongcatFlashForCausalLM",),
        all_full,
        keys={
            "moe_topk": ("num_experts_per_tok",),
            "ffn_hidden_size": ("intermediate_size",),
            "expert_ffn_hidden_size": ("moe_intermediate_size",),
        },
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0},
        derived=_layers,
        stored_name=_stored_name,
        interleaved_rope=True,
        has_latent_attention=True,
        has_scaled_ranks=True,
        has_shortcuts=True,
        moe=MixtureOfExperts(
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="intermediate_size",
            identity_experts="zero_expert_num",
        ),
    )
}

"""Step-3 (StepFun, 2025, arXiv:2507.19427): multi-matrix factorization attention (Hu et al.,
arXiv:2412.19255), and experts beside an MLP that every token runs through."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, num_layers
from anydecode.models.limits import refusal

_KEY = "moe_layers_enum"


def unlisted_layers(config: Config, num_dense: int = 1) -> dict[str, Any]:
    """The layers without experts: those that the config does not list, or the first ones."""
    listed, count = config.get(_KEY), num_layers(config)
    if listed is None:
        return {"mlp_only_layers": list(range(num_dense))}
    if isinstance(listed, str):
        listed = [part.strip() for part in listed.split(",") if part.strip()]
    if not isinstance(listed, list) or not all(str(one).isdecimal() for one in listed):
        raise refusal(_KEY, config[_KEY], "numbers of layers, separated by commas")
    with_experts = {int(one) for one in listed}
    return {"mlp_only_layers": [layer for layer in range(count) if layer not in with_experts]}


FAMILIES = {
    "step3_text": Family(
        ("Step3TextForCausalLM", "Step3VLForConditionalGeneration"),
        all_full,
        model_types=("step3_vl",),
        query_rank="share_q_dim",
        keys={
            "num_attention_groups": ("num_key_value_heads",),
            "max_position_embedding": ("max_position_embeddings",),
            "moe_num_experts": ("num_experts",),
            "moe_top_k": ("num_experts_per_tok",),
            "norm_expert_weight": ("norm_topk_prob",),
        },
        names={
            "self_attn.q_a_proj": "self_attn.q_proj",
            "self_attn.q_a_layernorm": "self_attn.inter_norm",
            "self_attn.q_b_proj": "self_attn.wq",
        },
        derived=unlisted_layers,
        defaults={
            "num_key_value_heads": 1,
            "head_dim": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
        },
        moe=MixtureOfExperts(
            is_normalised=False, shared_module="share_expert", shared_size="share_expert_dim"
        ),
    )
}

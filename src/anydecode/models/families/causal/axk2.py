"""A.X K2 (SK Telecom, 2026): DeepSeek-V3.2 with gates of norms and of the attention."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.causal.deepseek_v32 import FAMILIES as SPARSE

FAMILIES = {
    "axk2": replace(
        SPARSE["deepseek_v32"],
        architectures=("AXK2ForCausalLM",),
        attention_gate="sigmoid",
        has_raw_queries=True,
        norm_gate="gated_norm_rank",
        names={
            "input_layernorm": "input_layernorm.norm",
            "attention_norm_gate": "input_layernorm.mlp",
            "mlp_norm_gate": "post_attention_layernorm.mlp",
        },
        # Dense layers have a norm without a gate.
        other_names={"post_attention_layernorm": "post_attention_layernorm.norm"},
        defaults={
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 16,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "gated_norm_rank": 16,
        },
    )
}

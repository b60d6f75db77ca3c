"""nanochat (Karpathy, 2025): norms without weights, also of the embeddings and, after the rotary
embedding, of queries and keys; the rotation is the other way round."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "nanochat": Family(
        ("NanoChatForCausalLM",),
        all_full,
        has_norm_weights=False,
        has_embedding_norm=True,
        qk_norm="plain",
        norm_after_rope=True,
        has_reversed_rope=True,
        mlp="plain",
        names={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    )
}

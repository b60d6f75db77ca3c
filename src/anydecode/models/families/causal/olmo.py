"""OLMo (Groeneveld et al., 2024, arXiv:2402.00838): its norms have no weights."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "olmo": Family(
        ("OlmoForCausalLM",), all_full, norm="layer", has_norm_weights=False, has_qkv_limit=True
    )
}

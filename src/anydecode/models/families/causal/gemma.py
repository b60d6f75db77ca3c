"""Gemma (Gemma team, 2024, arXiv:2403.08295) and VaultGemma (Sinha et al., 2025,
arXiv:2510.15001)."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full, full_every_nth
from anydecode.models.families.values import Config

_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6}


def _activation(config: Config) -> dict[str, Any]:
    """Early configs say "gelu", but the models were trained with its approximation."""
    name = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return {"hidden_activation": name}


FAMILIES = {
    "gemma": Family(
        ("GemmaForCausalLM",),
        all_full,
        norm_offset=1.0,
        has_scaled_embedding=True,
        derived=_activation,
        defaults=_DEFAULTS,
    ),
    "vaultgemma": Family(
        ("VaultGemmaForCausalLM",),
        full_every_nth,
        norm_offset=1.0,
        has_scaled_embedding=True,
        has_attention_softcap=True,
        names={"post_attention_layernorm": "pre_feedforward_layernorm"},
        defaults={
            **_DEFAULTS,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
}

"""Jais (Sengupta et al., 2023, arXiv:2308.16149): GPT-2 with linear biases of attention and with a
gated MLP; its layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.patterns import all_full, no_rope
from anydecode.models.families.values import Config, bool_value, head_dim, value_or
from anydecode.models.limits import number


def _factor(config: Config, *keys: str) -> float:
    """The product of the factors under these keys."""
    product = 1.0
    for key in keys:
        product *= number(key, value_or(config, key, 1.0))
    return product


def _scales(config: Config) -> Scales:
    """Those of maximal update parametrisation, under the keys of the first models or later ones."""
    is_inverse = any(bool_value(config, f"{prefix}scale_qk_dot_by_d") for prefix in ("", "mup_"))
    return Scales(
        embedding=_factor(config, "embeddings_scale", "mup_embeddings_scale"),
        attention=head_dim(config) ** (-1.0 if is_inverse else -0.5),
        logits=_factor(config, "width_scale", "mup_width_scale", "mup_output_alpha"),
    )


FAMILIES = {
    "jais": Family(
        ("JAISLMHeadModel",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        has_alibi=True,
        rope_layers=no_rope,
        scales=_scales,
        defaults={"attention_bias": True, "mlp_bias": True},
    )
}

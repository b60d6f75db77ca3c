"""K-EXAONE (LG AI Research, 2026, arXiv:2601.01739): EXAONE 4 with experts, and with norms in front
of sublayers."""

from __future__ import annotations

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, hybrid_pattern, listed_dense_layers
from anydecode.models.families.values import Config


def _layer_types(config: Config) -> list[str]:
    """Those of EXAONE 4, but the last layer attends to all positions."""
    return [*hybrid_pattern(config)[:-1], FULL]


FAMILIES = {
    "exaone_moe": family_like(
        "exaone4",
        "ExaoneMoeForCausalLM",
        layer_types=_layer_types,
        norms="pre",
        keys={"num_shared_experts": ("n_shared_experts",)},
        derived=listed_dense_layers,
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "first_k_dense_replace": 1,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
    )
}

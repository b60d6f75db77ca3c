"""Code World Model (FAIR CodeGen team, 2025, arXiv:2510.02387)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL, SLIDING
from anydecode.models.families.values import Config, num_layers


def _full_every_fourth(config: Config) -> list[str]:
    """The first layer of every four attends to all positions."""
    return [SLIDING if layer % 4 else FULL for layer in range(num_layers(config))]


FAMILIES = {
    "cwm": Family(
        ("CwmForCausalLM",),
        _full_every_fourth,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    )
}

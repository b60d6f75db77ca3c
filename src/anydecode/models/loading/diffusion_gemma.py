"""The sampler's settings of DiffusionGemma, which are not in its config."""

from __future__ import annotations

from typing import Any

_MODEL_TYPES = ("diffusion_gemma", "diffusion_gemma_text")


def with_sampler(config: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    """Add the contents of `generation_config.json` to a config of this family."""
    if config.get("model_type") not in _MODEL_TYPES:
        return config
    return {**config, "generation_config": generation}

"""EmbeddingGemma 2 (Google, 2026): Gemma 4 whose rows attend to both sides, with embeddings per
layer that are projections of the usual ones, and a matrix behind the last norm, which the pooling
has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.patterns import FULL, SLIDING, full_every_nth
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import (
    Config,
    int_value,
    layer_overrides,
    list_value,
    mapping_value,
    num_layers,
)


def _layers(config: Config) -> dict[str, Any]:
    """The types of layers, and the sizes of those with full attention. The config has how far a row
    with a window sees on each side."""
    types = list_value(config, "layer_types", str) or full_every_nth(config)
    types = [*types[: num_layers(config) - 1], FULL]
    sizes = {
        "head_dim": int_value(config, "global_head_dim", 512),
        "num_key_value_heads": int_value(config, "num_global_key_value_heads", 1),
    }
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "default", "rope_theta": 1e6},
    }
    return {
        "layer_types": types,
        "per_layer_config": layer_overrides(config)
        or {str(layer): sizes for layer, kind in enumerate(types) if kind == FULL},
        "rope_parameters": mapping_value(config, "rope_parameters") or ropes,
        "sliding_window": int_value(config, "sliding_window", 512) + 1,
    }


EMBEDDING_GEMMA_2 = replace(
    FAMILIES["gemma4_text"],
    architectures=(
        *("EmbeddingGemma2Model", "EmbeddingGemma2ForCausalLM"),
        *("EmbeddingGemma2TextModel", "EmbeddingGemma2TextForCausalLM"),
    ),
    causal=False,
    is_encoder=True,
    has_per_layer_table=False,
    moe=None,
    derived=_layers,
    names={
        **{
            f"per_layer_{part}": f"ple.per_layer_{part}"
            for part in ("model_projection", "projection_norm")
        },
        **{
            part: f"ple_block.{part}"
            for part in (
                *("per_layer_input_gate", "per_layer_projection"),
                "post_per_layer_input_norm",
            )
        },
    },
    defaults={
        **FAMILIES["gemma4_text"].defaults,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 512,
    },
)

"""dots3-note (rednote, 2026), its language model: DeepSeek-V3.2 with gates of heads, a norm of the
part of the keys with positions, and layers with windows, whose latent attention has sizes of its
own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.causal.deepseek_v32 import FAMILIES as SPARSE
from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, listed_dense_layers
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    layer_overrides,
    list_value,
    mapping_value,
    num_layers,
    value_or,
)
from anydecode.models.limits import MAX_EXPERTS, refusal

#: The layers whose rows attend to what an indexer selects.
_INDEXED = "indexed_attention"
#: The sizes of layers with windows, and those of the published model. Published configs have them
#: with a prefix.
_SIZES = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
#: Options of published configs, and the only value that is supported.
_FIXED = {
    "k_rope_only_layernorm": True,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
    "normalization": "RMSNorm",
    "final_norm": "RMSNorm",
    "use_dynamic_rsf": False,
}


def _layer_types(config: Config) -> list[str]:
    """Those of the config, where published ones call the layers with an indexer
    "full_attention"."""
    types = list_value(config, "layer_types", str)
    has_windows = bool_value(config, "use_sliding_window", True)
    if types is None:
        types = [
            _INDEXED if not has_windows or layer < 2 or layer % 4 == 1 else SLIDING
            for layer in range(num_layers(config))
        ]
    uses_indexer = config.get("use_dsa")
    if uses_indexer is None:
        uses_indexer = _INDEXED in types or "per_layer_config" not in config
    return [kind if kind == SLIDING else (_INDEXED if uses_indexer else FULL) for kind in types]


def _layers(config: Config) -> dict[str, Any]:
    for key, allowed in _FIXED.items():
        if config.get(key) not in (None, allowed):
            raise refusal(key, config[key], repr(allowed))
    if "indexer_types" in config:  # derived before, or of a GGUF file
        return {}
    types = _layer_types(config)
    sizes = {key: config.get(f"swa_{key}", size) for key, size in _SIZES.items()}
    own = {str(layer): sizes for layer, kind in enumerate(types) if kind == SLIDING}
    shared = int_value(config, "n_shared_experts", high=MAX_EXPERTS) * int_value(
        config,
        "moe_shared_expert_intermediate_size",
        int_value(config, "shared_experts_intermediate_size", 1536),
    )
    return {
        "layer_types": [SLIDING if kind == SLIDING else FULL for kind in types],
        "indexer_types": ["full" if kind == _INDEXED else "none" for kind in types],
        "per_layer_config": layer_overrides(config) or own,
        "rope_parameters": _ropes(config),
        "sliding_window": int_value(
            config, "sliding_window", int_value(config, "sliding_window_size", 512)
        ),
        "all_shared_experts_size": shared,
        **listed_dense_layers(config),
    }


def _ropes(config: Config) -> dict[str, Any]:
    """The rotary embeddings of both kinds of layers."""
    given = mapping_value(config, "rope_parameters")
    if any(kind in given for kind in (_INDEXED, FULL, SLIDING)):
        full = given.get(_INDEXED, given.get(FULL))
        return {FULL: full or {}, SLIDING: given.get(SLIDING) or {}}
    given = given or mapping_value(config, "rope_scaling")
    if given:
        return {FULL: given, SLIDING: given}
    return {
        FULL: {"rope_theta": value_or(config, "rope_theta", 8e7)},
        SLIDING: {"rope_theta": value_or(config, "swa_rope_theta", 5e4)},
    }


FAMILIES = {
    "dots3_note_text": replace(
        SPARSE["deepseek_v32"],
        architectures=("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
        model_types=("dots3_note",),
        derived=_layers,
        attention_gate="sigmoid",
        gates_heads=True,
        has_scaled_ranks=True,
        has_rotary_norm=True,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="all_shared_experts_size",
        ),
        defaults={
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "indexer_rope_interleave": True,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
    )
}

"""Nanbeige 4.2 (Nanbeige LLM Lab, 2026): Llama whose layers run several times in sequence."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import looped_layers
from anydecode.models.families.values import Config, bool_value, int_value
from anydecode.models.limits import MAX_LAYERS, refusal

#: What its code may do beside, and no published model does.
_OTHERS = (
    *("emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers"),
    *("enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection"),
    *("enable_mhc", "enable_h_res_identity", "enable_depth_attention"),
)


def _loops(config: Config) -> dict[str, Any]:
    """All runs of the layers."""
    for key in () if "num_stored_layers" in config else _OTHERS:
        if config.get(key):
            raise refusal(key, config[key], "unset: it is not supported")
    loops = int_value(config, "num_loops", 1, high=MAX_LAYERS)
    return looped_layers(config, loops, not bool_value(config, "skip_loop_final_norm"))


FAMILIES = {"nanbeige": family_like("llama", "NanbeigeForCausalLM", derived=_loops)}

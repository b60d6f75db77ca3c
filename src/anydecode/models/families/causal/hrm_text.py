"""HRM-Text (Sapient, 2026; after "Hierarchical Reasoning Model", arXiv:2506.21734): two stacks of
layers with a state each run in turn, the low one several times for each time of the high one. The
input of a stack is the sum of both states, its output its new state, without weights of norms.

As in its own code, the rows of a prompt attend to earlier ones only, unless token types say
otherwise, which are not read.
"""

from __future__ import annotations

import re
from typing import Any

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value, int_value
from anydecode.models.limits import MAX_COUNT, MAX_LAYERS, number, refusal

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def _layers(config: Config) -> dict[str, Any]:
    """The layers in the order in which they run. `num_hidden_layers` is that of one stack, unless
    another key has it."""
    size = int_value(config, "num_layers_per_stack", int_value(config, "num_hidden_layers"))
    high, low = (int_value(config, f"{kind}_cycles", high=MAX_LAYERS) for kind in "HL")
    count = size * high * (low + 1)
    if count > MAX_LAYERS:
        raise refusal("H_cycles * (L_cycles + 1) * num_layers_per_stack", count, f"{MAX_LAYERS}")
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    low_stack, high_stack = list(range(size)), list(range(size, 2 * size))
    return {
        "num_layers_per_stack": size,
        "num_hidden_layers": count,
        "num_key_value_heads": heads,
        "num_stored_layers": 2 * size,
        "layer_sources": (low_stack * low + high_stack) * high,
        "loop_size": size,
        "has_loop_norms": True,
        # At the start of a stack that another one follows, the states change their places.
        "state_kinds": (["swaps"] + ["joins"] * (low - 1) + ["swaps"]) * high,
    }


def _stored_name(config: Config, name: str) -> str:
    """Checkpoints number the layers of each stack; GGUF files those of both."""
    layer = _LAYER.fullmatch(name)
    if layer is None or bool_value(config, "has_numbered_layers"):
        return name
    size, index = int_value(config, "num_layers_per_stack"), int(layer[1])
    stack = "L_module" if index < size else "H_module"
    return f"{stack}.layers.{index % size}.{layer[2]}"


def _scales(config: Config) -> Scales:
    return Scales(number("embedding_scale", config.get("embedding_scale")))


FAMILIES = {
    "hrm_text": Family(
        ("HrmTextForCausalLM",),
        all_full,
        attention_gate="sigmoid",
        has_norm_weights=False,
        has_states=True,
        stored_name=_stored_name,
        scales=_scales,
        derived=_layers,
        defaults={"head_dim": 128, "H_cycles": 2, "L_cycles": 3},
    )
}

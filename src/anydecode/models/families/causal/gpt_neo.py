"""GPT-Neo (EleutherAI, 2021; TinyStories, arXiv:2305.07759, too), whose layout is converted when it
is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.patterns import FULL, SLIDING, no_rope
from anydecode.models.families.values import Config, list_value, num_layers
from anydecode.models.limits import MAX_LAYERS, integer, refusal

_KINDS = {"global": FULL, "local": SLIDING}


def _layer_types(config: Config) -> list[str]:
    """The type of each layer: from a list, or from pairs of types and how often they repeat."""
    names = list_value(config, "attention_layers", str)
    if names is None:
        names = []
        key = "attention_types"
        for pair in list_value(config, key, list) or [[["global", "local"], num_layers(config)]]:
            if len(pair) != 2 or not isinstance(pair[0], list) or len(pair[0]) > MAX_LAYERS:
                raise refusal(key, config.get(key), "pairs of a list of types and a number")
            names += pair[0] * integer(key, pair[1], 0, MAX_LAYERS)
    if not all(name in _KINDS for name in names):
        raise refusal("attention_layers", names, "a list of global and local")
    return [_KINDS[name] for name in names[: num_layers(config)]]


def _unscaled(config: Config) -> Scales:
    """Products of queries and keys are not scaled."""
    return Scales(attention=1.0)


FAMILIES = {
    "gpt_neo": Family(
        ("GPTNeoForCausalLM",),
        _layer_types,
        rope_layers=no_rope,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        has_position_table=True,
        scales=_unscaled,
        defaults={"attention_out_bias": True, "mlp_bias": True},
    )
}

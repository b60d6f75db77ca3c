"""Llama 3.2 Vision (Meta, 2024, arXiv:2407.21783), which reads texts without its layers of
attention to images: Llama 3.1."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, int_value, list_value
from anydecode.models.limits import MAX_LAYERS, refusal


def _image_layers(config: Config) -> list[int]:
    """The layers of attention to images, in order; those of the published models if the config
    lacks them."""
    layers = list_value(config, "cross_attention_layers", int)
    return sorted(set(range(3, 40, 5) if layers is None else layers))


def _without_image_layers(config: Config) -> dict[str, Any]:
    count, layers = int_value(config, "num_hidden_layers", high=MAX_LAYERS), _image_layers(config)
    if layers and not 0 <= layers[0] <= layers[-1] < count:
        raise refusal("cross_attention_layers", layers, f"layers from 0 to {count - 1}")
    return {"num_hidden_layers": count - len(layers)}


def _stored_name(config: Config, name: str) -> str:
    """The name of a tensor or module in checkpoints, where layers of both kinds are numbered."""
    start, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if start != "layers" or not number.isdigit():
        return name
    index = int(number)
    for layer in _image_layers(config):
        index += layer <= index
    return f"layers.{index}.{part}".removesuffix(".")


FAMILIES = {
    "mllama_text_model": family_like(
        "llama",
        *("MllamaForCausalLM", "MllamaForConditionalGeneration"),
        derived=_without_image_layers,
        stored_name=_stored_name,
        num_unused_embeddings=8,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    )
}

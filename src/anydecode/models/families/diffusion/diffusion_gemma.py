"""DiffusionGemma (Google DeepMind, 2026): the layers of Gemma 4 with experts, in two roles.

As a causal context, layers have other scales than as the canvas behind it, which holds random
tokens in place of masks. Of the published checkpoints the language model is read, and the settings
of the sampler in `generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.patterns import gemma4_layers
from anydecode.models.families.values import Config, mapping_value
from anydecode.models.limits import MAX_COUNT, integer, number, refusal


def _layers(config: Config) -> dict[str, Any]:
    """What the configs of Gemma 4 say and these do not, since all of their models have it."""
    fixed = {
        "enable_moe_block": bool(config.get("num_experts")),
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
    return fixed | gemma4_layers({**config, **fixed})


#: The class of sampler that is known, and the values of its settings if the files do not say them.
_SAMPLER = "EntropyBoundSamplerConfig"
_PUBLISHED = {
    "steps": 48,
    "bound": 0.1,
    "first_temperature": 0.8,
    "last_temperature": 0.4,
    "stable": 1,
    "settled": 0.005,
}


def _sampler(config: Config) -> dict[str, int | float]:
    """The parameters of the decoder that `generation_config.json` sets: `max_denoising_steps`,
    `entropy_bound` of `sampler_config`, `t_max`, `t_min`, `stability_threshold` and
    `confidence_threshold`."""
    given = config.get("generation_config") or {}
    sampler = mapping_value(given, "sampler_config") if given.get("sampler_config") else {}
    kind = sampler.get("_cls_name", _SAMPLER)
    if kind != _SAMPLER:
        raise refusal("sampler_config", kind, _SAMPLER)
    whole = partial(integer, high=MAX_COUNT)
    checks: dict[str, tuple[str, Config, Callable[..., int | float], float]] = {
        "steps": ("max_denoising_steps", given, whole, 1),
        "bound": ("entropy_bound", sampler, number, 0.0),
        "first_temperature": ("t_max", given, number, 0.0),
        "last_temperature": ("t_min", given, number, 0.0),
        "stable": ("stability_threshold", given, whole, 0),
        "settled": ("confidence_threshold", given, number, 0.0),
    }
    found = {
        name: check(key, source[key], low=low)
        for name, (key, source, check, low) in checks.items()
        if source.get(key) is not None
    }
    options = _PUBLISHED | found
    if options["first_temperature"] < options["last_temperature"]:
        raise refusal("t_max", options["first_temperature"], "t_min or more")
    return {name: value for name, value in found.items() if value != _PUBLISHED[name]}


FAMILIES = {
    "diffusion_gemma_text": diffusion_family(
        "gemma4_text",
        "DiffusionGemmaForBlockDiffusion",
        denoising=Denoising(
            "DiffusionGemma-26B-A4B",
            context="causal",
            block_size="canvas_length",
            default_block_size=256,
            has_canvas=True,
            decoder="diffusion-gemma:cache=block",
            decoder_options=_sampler,
        ),
        derived=_layers,
    )
}

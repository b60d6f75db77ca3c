"""The configs of diffusion models from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.limits import MAX_COUNT, MAX_SIZE, integer, number, refusal
from anydecode.models.loading.gguf_experts import experts, qwen3_moe
from anydecode.models.loading.gguf_gemma import gemma4
from anydecode.models.loading.gguf_keys import Keys


def denoising(keys: Keys, config: dict[str, Any]) -> None:
    """Diffusion models: which position a row predicts, and the mask token."""
    metadata, path = keys.file.metadata, keys.file.path
    _refuse_causal(keys)
    shift = metadata.get("diffusion.shift_logits")
    if shift is not None:
        if not isinstance(shift, bool):
            raise refusal(f"{path}: metadata diffusion.shift_logits", shift, "true or false")
        config["right_shift_logits"] = shift
    mask = metadata.get("tokenizer.ggml.mask_token_id")
    if isinstance(mask, int):
        config["mask_token_id"] = mask


def dream(keys: Keys, config: dict[str, Any]) -> None:
    """Dream."""
    denoising(keys, config)
    config["use_sliding_window"] = False


def llada_moe(keys: Keys, config: dict[str, Any]) -> None:
    """LLaDA-MoE."""
    denoising(keys, config)
    experts(keys, config)
    config["expert_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["dense_intermediate_size"] = config["intermediate_size"]
    config["qk_layernorm"] = True


def rnd1(keys: Keys, config: dict[str, Any]) -> None:
    """RND1."""
    denoising(keys, config)
    qwen3_moe(keys, config)


#: The settings of DiffusionGemma's sampler in metadata, and in `generation_config.json`.
_SAMPLER = {
    "diffusion.eb_max_steps": "max_denoising_steps",
    "diffusion.eb_t_min": "t_min",
    "diffusion.eb_t_max": "t_max",
    "diffusion.eb_stability_threshold": "stability_threshold",
    "diffusion.eb_confidence_threshold": "confidence_threshold",
    "diffusion.eb_entropy_bound": "entropy_bound",
}


def diffusion_gemma(keys: Keys, config: dict[str, Any]) -> None:
    """DiffusionGemma: the layers of Gemma 4, the length of the canvas, and the sampler."""
    _refuse_causal(keys)
    gemma4(keys, config)
    metadata, name = keys.file.metadata, "diffusion.canvas_length"
    if name in metadata:
        where = f"{keys.file.path}: metadata {name}"
        config["canvas_length"] = integer(where, metadata[name], 1, MAX_SIZE)
    sampler: dict[str, Any] = {}
    for name, key in _SAMPLER.items():
        if name in metadata:
            where, value = f"{keys.file.path}: metadata {name}", metadata[name]
            is_count = key in ("max_denoising_steps", "stability_threshold")
            # Numbers of 32 bits are read as the shortest decimal numbers that are rounded to them.
            sampler[key] = (
                integer(where, value, int(key == "max_denoising_steps"), MAX_COUNT)
                if is_count
                else float(str(np.float32(number(where, value, 0.0))))
            )
    bound = sampler.pop("entropy_bound", None)
    if bound is not None:
        sampler["sampler_config"] = {"entropy_bound": bound}
    config["generation_config"] = sampler


def _refuse_causal(keys: Keys) -> None:
    if keys.get("attention.causal", False) is not False:
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture} with causal attention is unsupported"
        )

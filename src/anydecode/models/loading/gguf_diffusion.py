"""The configs of diffusion models from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.limits import MAX_SIZE, integer, refusal
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


def diffusion_gemma(keys: Keys, config: dict[str, Any]) -> None:
    """DiffusionGemma: the layers of Gemma 4, and the length of the canvas."""
    _refuse_causal(keys)
    gemma4(keys, config)
    name = "diffusion.canvas_length"
    if name in keys.file.metadata:
        length = keys.file.metadata[name]
        config["canvas_length"] = integer(f"{keys.file.path}: metadata {name}", length, 1, MAX_SIZE)


def _refuse_causal(keys: Keys) -> None:
    if keys.get("attention.causal", False) is not False:
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture} with causal attention is unsupported"
        )

"""Checkpoints in published layouts, and the saved state of a training run.

A diffusion model is written in LLaDA's layout (GSAI-ML/LLaDA-8B-Instruct), an autoregressive one in
Llama's; the engine's loader opens both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading.llada import INNER_NAMES
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.tokenizer import EOS, EOS_ID, MASK, MASK_ID, PAD, PAD_ID
from anydecode.training.transformer import Shape


def save_llada(
    folder: Path, weights: dict[str, torch.Tensor], shape: Shape, tokenizer: tokenizers.Tokenizer
) -> None:
    """Write `weights`, a state dict of `Transformer`, as a masked-diffusion checkpoint."""
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "block_type": "llama",
        "d_model": shape.width,
        "embedding_size": shape.vocab,
        "eos_token_id": EOS_ID,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": MASK_ID,
        "max_sequence_length": shape.max_positions,
        "mlp_hidden_size": shape.hidden,
        "n_heads": shape.heads,
        "n_kv_heads": shape.heads,
        "n_layers": shape.layers,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "weight_tying": False,
    }
    _save(folder, config, {f"model.{name}": weights[name] for name in weights}, tokenizer)


def save_llama(
    folder: Path, weights: dict[str, torch.Tensor], shape: Shape, tokenizer: tokenizers.Tokenizer
) -> None:
    """Write `weights`, a state dict of `Transformer`, as an autoregressive checkpoint."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_llama_config(shape)}
    config |= {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _save(folder, config, {llama_name(name): weights[name] for name in weights}, tokenizer)


def save_block_llama(
    folder: Path,
    weights: dict[str, torch.Tensor],
    shape: Shape,
    tokenizer: HFTokenizer,
    mask: int,
    block: dict[str, Any],
) -> None:
    """Write `weights`, a state dict of `Transformer`, as a block-diffusion checkpoint: Llama's
    layout, the dLLM library's model type for models made bidirectional, and the config entries of
    `block`.
    """
    config = {
        "architectures": ["A2DLlamaLMHeadModel"],
        "model_type": "a2d-llama",
        **_llama_config(shape),
    }
    config |= {**block, "mask_token_id": mask, "eos_token_id": [*tokenizer.eos_ids]}
    special = {**tokenizer.special_texts, "mask_token": tokenizer.token_text(mask)}
    tensors = {llama_name(name): weights[name] for name in weights}
    _save(folder, config, tensors, tokenizer.backend, special)


def writable_tokenizer(checkpoint: Checkpoint) -> HFTokenizer:
    """The tokenizer of a checkpoint, for a model that is trained from it. Raises `CheckpointError`
    if it cannot be written."""
    tokenizer = checkpoint.tokenizer
    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.is_writable:
        raise CheckpointError(
            f"{checkpoint.name}: its tokenizer has no form as tokenizer.json, which the trained"
            " model needs"
        )
    return tokenizer


def save_nested_llama(
    folder: Path,
    weights: dict[str, torch.Tensor],
    shape: Shape,
    tokenizer: HFTokenizer,
    mask: int | None = None,
) -> None:
    """Write `weights`, a state dict of `Transformer`, as an autoregressive checkpoint with the
    tokenizer of the model that they come from, and its chat template; `mask` is its mask token."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_llama_config(shape)}
    tensors = {llama_name(name): weights[name] for name in weights}
    if shape.is_tied:
        del tensors["lm_head.weight"]
    save_with_tokenizer(folder, config, tensors, tokenizer, mask)


def save_with_tokenizer(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tokenizer: HFTokenizer,
    mask: int | None,
) -> None:
    """Write a checkpoint with the tokenizer of the model that it comes from, and its chat template;
    `mask` is its mask token."""
    special = dict(tokenizer.special_texts)
    if tokenizer.chat_template is not None:
        special["chat_template"] = tokenizer.chat_template
    config = {**config, "eos_token_id": [*tokenizer.eos_ids]}
    if mask is not None:
        config["mask_token_id"] = mask
        special["mask_token"] = tokenizer.token_text(mask)
    _save(folder, config, tensors, tokenizer.backend, special)


def save_blockffn(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Write the weights of a BlockFFN model, by their names in its layout, with a tokenizer of the
    small models."""
    ends = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _save(folder, {**config, **ends}, weights, tokenizer)


def _llama_config(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    }


def write_adapter(
    out: Path,
    tensors: dict[str, torch.Tensor],
    base: str,
    rank: int,
    alpha: int,
    modules: Iterable[str],
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` in PEFT's layout.

    Args:
        out: The folder.
        tensors: The factors, by their names in this layout.
        base: The name or path of the model that is adapted.
        rank: The rank of the updates.
        alpha: What the updates are multiplied by, times the rank.
        modules: The names of the modules that are updated, of which the last parts are written.
    """
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": base,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    save_json(out / "adapter_config.json", config)


def llama_name(name: str) -> str:
    """The name of a `Transformer` parameter in the layout of Llama, Qwen2, Qwen3 and Qwen3-MoE."""
    parts = name.removeprefix("transformer.").split(".")
    if parts[0] == "blocks":
        module = INNER_NAMES.get(parts[2]) or f"self_attn.{parts[2]}"
        if parts[2] in ("router", "experts"):
            module = "mlp.gate" if parts[2] == "router" else f"mlp.{'.'.join(parts[2:-1])}"
        return f"model.layers.{parts[1]}.{module}.{parts[-1]}"
    outer = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
    return f"{outer[parts[0]]}.weight"


def _save(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tokenizer: tokenizers.Tokenizer,
    special: dict[str, str] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if special is None:
        special = {"eos_token": EOS, "pad_token": PAD, "mask_token": MASK}
        tensors = _suppress_special_tokens(tensors, tokenizer)
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(rounded, str(folder / "model.safetensors"), metadata={"format": "pt"})
    settings = {**special, "tokenizer_class": "PreTrainedTokenizerFast"}
    save_json(folder / "config.json", config)
    save_json(folder / "tokenizer_config.json", settings)
    tokenizer.save(str(folder / "tokenizer.json"))


def _suppress_special_tokens(
    tensors: dict[str, torch.Tensor], tokenizer: tokenizers.Tokenizer
) -> dict[str, torch.Tensor]:
    """The tensors with the output rows of the mask and padding tokens replaced by that of "!".
    Training never predicts these tokens, so their logits were never lowered; no task text contains
    "!", so its logit was."""
    names = ("model.transformer.ff_out.weight", "lm_head.weight")
    name = next(name for name in names if name in tensors)
    head = tensors[name].clone()
    head[[PAD_ID, MASK_ID]] = head[tokenizer.token_to_id("!")].clone()
    return {**tensors, name: head}


def save_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a run's state atomically: an interrupted write leaves the previous state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    temporary.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """Load a state of tensors and numbers; None if there is no file."""
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

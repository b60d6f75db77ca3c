"""Diffusion models from their checkpoints, to be trained further: those with the layers of Llama,
Qwen2 or Qwen3 whose rows see the whole canvas (LLaDA, Dream) or blocks (SDAR)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import spec_from_config, text_config
from anydecode.models.families.values import bool_value, head_dim
from anydecode.models.files import read_json, untrusted
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.llada import is_llada
from anydecode.models.opening import with_mask
from anydecode.models.tokenizer import Tokenizer
from anydecode.training.checkpoint import llama_name
from anydecode.training.tokenizer import SpecialTokens
from anydecode.training.transformer import Shape, Transformer


@dataclass(frozen=True)
class Teacher:
    """An opened model, float32, and where its files are."""

    model: Transformer
    tokenizer: Tokenizer
    special: SpecialTokens
    folder: Path


def open_teacher(folder: Path) -> Teacher:
    """Open a diffusion model for training.

    Raises:
        CheckpointError: The folder holds another model, or one with other layers.
    """
    checkpoint = load_checkpoint(folder)
    name = checkpoint.name
    with untrusted(checkpoint.path):
        spec, config = spec_from_config(checkpoint.config), text_config(checkpoint.config)
    if not checkpoint.path.is_dir():
        raise CheckpointError(f"{name}: training needs a folder of safetensors")
    if spec.causal:
        raise CheckpointError(f"{name}: training needs a diffusion model, not a causal one")
    if spec.has_causal_context or (spec.block_size and spec.logit_shift):
        raise CheckpointError(
            f"{name}: training needs a diffusion model without a causal context, and without both"
            " blocks and shifted logits"
        )
    if config.get("rope_scaling") or config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{name}: training needs plain rotary embeddings and hidden_act 'silu'"
        )
    if any(layer.attention is None or layer.attention.window for layer in spec.layers):
        raise CheckpointError(f"{name}: training needs full attention, without windows")
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{name}: training needs the model's tokenizer")
    tokenizer = with_mask(checkpoint.tokenizer, spec)
    model = Transformer(
        Shape(
            vocab=spec.vocab_size,
            width=spec.hidden_size,
            layers=spec.num_layers,
            heads=int(config["num_attention_heads"]),
            hidden=int(config["intermediate_size"]),
            max_positions=min(spec.max_positions, 2048),
            rope_theta=float(config.get("rope_theta") or 10_000.0),
            norm_eps=spec.norm_eps,
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_size=head_dim(config),
            has_bias="model.layers.0.self_attn.q_proj.bias" in checkpoint.tensors,
            has_head_norms=spec.layers[0].qk_norm == "head",
            is_tied=bool_value(config, "tie_word_embeddings"),
            logit_shift=spec.logit_shift,
            block_size=spec.block_size,
        )
    )
    _read_weights(checkpoint, model)
    return Teacher(model.eval(), tokenizer, _special_tokens(name, tokenizer, config), folder)


def save_student(teacher: Teacher, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write `weights`, a state dict of `Transformer`, in the layout of the teacher's checkpoint,
    with its other files."""
    out.mkdir(parents=True, exist_ok=True)
    for file in teacher.folder.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "README.md":
            shutil.copy(file, out / file.name)
    in_llada = is_llada(read_json(teacher.folder / "config.json"))
    tensors = {
        f"model.{name}" if in_llada else llama_name(name): weights[name].to(torch.bfloat16)
        for name, _ in teacher.model.named_parameters()
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def _read_weights(checkpoint: Checkpoint, model: Transformer) -> None:
    needed = {name: llama_name(name) for name, _ in model.named_parameters()}
    stored = {name for name in checkpoint.tensors if not name.endswith("rotary_emb.inv_freq")}
    if others := sorted(stored - {*needed.values()}):
        raise CheckpointError(
            f"{checkpoint.name}: training needs the layers of Llama, Qwen2 or Qwen3, which have no"
            f" tensor {others[0]!r}"
        )
    if missing := sorted({*needed.values()} - stored):
        raise CheckpointError(f"{checkpoint.name}: the checkpoint has no tensor {missing[0]!r}")
    for name, parameter in model.named_parameters():
        tensor = checkpoint.tensors[needed[name]]
        values = dequantize(tensor) if isinstance(tensor, Weight) else tensor
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))


def _special_tokens(name: str, tokenizer: Tokenizer, config: Mapping[str, object]) -> SpecialTokens:
    if tokenizer.mask_id is None or not tokenizer.eos_ids:
        raise CheckpointError(f"{name}: its files name no mask token or no end of text")
    pad = config.get("pad_token_id")
    barred = {tokenizer.mask_id}
    if isinstance(pad, int) and 0 <= pad and pad not in tokenizer.eos_ids:
        barred.add(pad)
    return SpecialTokens(tokenizer.mask_id, min(tokenizer.eos_ids), tuple(sorted(barred)))

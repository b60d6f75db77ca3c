"""Diffusion models from their checkpoints, to be trained further.

Of those with the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE, alike in all layers, whose rows see
the whole canvas (LLaDA, Dream, RND1) or blocks (SDAR, Fast-dLLM v2, Efficient-DLM), also behind a
causal context (Nemotron-Labs-Diffusion), all weights are trained. Of all others that the engine
opens, an adapter is trained, see `network_model.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.families.config import spec_from_config, text_config
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import bool_value
from anydecode.models.files import read_json, untrusted
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.llada import is_llada
from anydecode.models.lora import row_orders
from anydecode.models.opening import as_family, fitted_tokenizer
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.weight_training import has_only
from anydecode.training.checkpoint import (
    llama_name,
    save_json,
    save_with_tokenizer,
    writable_tokenizer,
    write_adapter,
)
from anydecode.training.network_model import NetworkModel, reads_noise
from anydecode.training.tokenizer import SpecialTokens
from anydecode.training.transformer import Shape, Transformer

#: Files of a checkpoint that say how its weights are packed.
_PACKING = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
#: What the trained network has: fields of `ModelSpec`, `LayerSpec` and `Attention`.
_SPEC_FIELDS = {
    "architecture",
    "vocab_size",
    "hidden_size",
    "max_positions",
    "norm_eps",
    "layers",
    "causal",
    "logit_shift",
    "block_size",
    "has_prompt_block",
    "has_causal_context",
    "context_predicts_next",
    "mask_token",
    "decoder",
    "expand_token",
}
_LAYER_FIELDS = {"attention", "rope", "query_rope", "qk_norm", "num_experts", "routing"}
_ATTENTION_FIELDS = {"num_heads", "num_kv_heads", "head_dim", "scale"}
_ROUTING_FIELDS = {"experts_per_token", "normalise"}
#: The first gate of the MLPs, or of the experts.
_MLP = "transformer.blocks.0.ff_proj.weight"
_EXPERT = "transformer.blocks.0.experts.0.gate_proj.weight"
_BIAS = "transformer.blocks.0.q_proj.bias"
#: Maximum number of positions of the trained network.
_MAX_POSITIONS = 2048


#: A model that is trained: all of its weights, or an adapter.
Trained = TypeVar("Trained", bound=Transformer | NetworkModel, covariant=True)


class OtherLayersError(CheckpointError):
    """Not all weights of a model can be trained, because its layers are not Llama's."""


@dataclass(frozen=True)
class Teacher(Generic[Trained]):
    """An opened model, float32, and its checkpoint."""

    model: Trained
    tokenizer: Tokenizer
    special: SpecialTokens
    checkpoint: Checkpoint


def open_teacher(folder: Path) -> Teacher[Transformer]:
    """Open a diffusion model of which all weights can be trained: a folder, that of an adapter, or
    a `.gguf` file.

    Raises:
        OtherLayersError: It has other layers.
        CheckpointError: It is another model.
    """
    return _open_plain(*_load(folder))


def open_any_teacher(
    folder: Path, rank: int, seed: int = 0, family: str | None = None, mask: int | None = None
) -> Teacher[Transformer | NetworkModel]:
    """Open a diffusion model of any kind; where not all weights can be trained, with an adapter.

    Args:
        folder: A folder, that of an adapter, or a `.gguf` file.
        rank: Rank of the adapter.
        seed: Of its initial values.
        family, mask: What the model's files do not say, as those of `LLM`.

    Raises:
        CheckpointError: It is no diffusion model, or its files name no tokenizer or tokens.
        InvalidRequestError: There is no such family, or the mask is no token of the model.
    """
    checkpoint, spec = _load(folder, family)
    try:
        return _open_plain(checkpoint, spec, mask)
    except OtherLayersError:
        tokenizer, special = _tokens(checkpoint, spec, mask)
        model = NetworkModel(load_network(checkpoint), rank, seed, is_ordered=spec.causal)
        return Teacher(model.eval(), tokenizer, special, checkpoint)


def _load(folder: Path, family: str | None = None) -> tuple[Checkpoint, ModelSpec]:
    """A checkpoint of a diffusion model, and its architecture."""
    checkpoint = load_checkpoint(folder)
    if family is not None:
        checkpoint = as_family(checkpoint, family, None)
    with untrusted(checkpoint.path):
        spec = spec_from_config(checkpoint.config)
        found = FAMILIES[text_config(checkpoint.config)["model_type"]]
    if found.denoising is None:
        raise CheckpointError(
            f"{checkpoint.name}: training needs a diffusion model, not a causal one"
        )
    return checkpoint, spec


def _tokens(
    checkpoint: Checkpoint, spec: ModelSpec, mask: int | None
) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer of a model, and its special tokens."""
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{checkpoint.name}: training needs the model's tokenizer")
    tokenizer = fitted_tokenizer(checkpoint.tokenizer, spec, mask)
    return tokenizer, _special_tokens(checkpoint, tokenizer, spec)


def _open_plain(
    checkpoint: Checkpoint, spec: ModelSpec, mask: int | None = None
) -> Teacher[Transformer]:
    _check_layers(checkpoint.name, spec)
    tokenizer, special = _tokens(checkpoint, spec, mask)
    config, layer = text_config(checkpoint.config), spec.layers[0]
    attention, rope, routing = layer.attention, layer.rope, layer.routing
    assert attention is not None and rope is not None, "checked above"
    gate = _tensor(checkpoint, _EXPERT if layer.num_experts else _MLP)
    model = Transformer(
        Shape(
            vocab=spec.vocab_size,
            width=spec.hidden_size,
            layers=spec.num_layers,
            heads=attention.num_heads,
            hidden=gate.out_features if isinstance(gate, Weight) else len(gate),
            max_positions=min(spec.max_positions, _MAX_POSITIONS),
            norm_eps=spec.norm_eps,
            kv_heads=attention.num_kv_heads,
            head_size=attention.head_dim,
            has_bias=_stored_name(checkpoint, _BIAS) in checkpoint.tensors,
            has_head_norms=layer.qk_norm == "head",
            is_tied=bool_value(config, "tie_word_embeddings"),
            logit_shift=spec.logit_shift,
            block_size=spec.block_size,
            has_prompt_block=spec.has_prompt_block,
            has_causal_context=spec.has_causal_context,
            context_predicts_next=spec.context_predicts_next,
            num_experts=layer.num_experts,
            experts_per_token=0 if routing is None else routing.experts_per_token,
            normalises_experts=routing is None or routing.normalise,
            frequencies=tuple(rope.frequencies.tolist()),
            rope_factor=rope.factor,
        )
    )
    _read_weights(checkpoint, model)
    return Teacher(model.eval(), tokenizer, special, checkpoint)


def _check_layers(name: str, spec: ModelSpec) -> None:
    """Raise `OtherLayersError` unless `Transformer` computes what the model does."""
    if spec.time is not None or spec.has_canvas:
        raise OtherLayersError(
            f"{name}: not all weights of layers that read the time of the diffusion or its last"
            " predictions can be trained"
        )
    if spec.causal:
        raise OtherLayersError(
            f"{name}: not all weights of layers whose rows see what is before them alone can be"
            " trained to fill masks"
        )
    first = spec.layers[0]
    fits = has_only(spec, _SPEC_FIELDS) and all(
        _is_plain(layer) and _is_alike(layer, first) for layer in spec.layers
    )
    if not fits:
        raise OtherLayersError(
            f"{name}: training needs the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE, alike in all"
            f" layers, with full attention; this {spec.architecture} has others"
        )


def _is_alike(layer: LayerSpec, first: LayerSpec) -> bool:
    """Whether two plain layers have the same shape and rotary embedding."""
    assert layer.rope is not None and first.rope is not None
    names = ("attention", "qk_norm", "num_experts", "routing")
    return (
        all(getattr(layer, name) == getattr(first, name) for name in names)
        and layer.rope.factor == first.rope.factor
        and np.array_equal(layer.rope.frequencies, first.rope.frequencies)
    )


def _is_plain(layer: LayerSpec) -> bool:
    """Whether `Block` computes what the layer does, in the positions of the trained network."""
    attention, rope, routing = layer.attention, layer.rope, layer.routing
    if attention is None or rope is None or 2 * len(rope.frequencies) != attention.head_dim:
        return False
    query = layer.query_rope or rope
    has_growth = bool(query.growth) and query.growth_period < _MAX_POSITIONS + query.growth_start
    return (
        not (rope.growth or has_growth)
        and query.factor == rope.factor
        and np.array_equal(query.frequencies, rope.frequencies)
        and attention.scale == attention.head_dim**-0.5
        and layer.qk_norm in (None, "head")
        and (routing is None or has_only(routing, _ROUTING_FIELDS))
        and has_only(layer, _LAYER_FIELDS)
        and has_only(attention, _ATTENTION_FIELDS)
    )


def save_student(
    teacher: Teacher[Transformer | NetworkModel], weights: Mapping[str, torch.Tensor], out: Path
) -> None:
    """Write `weights`, a state dict of the teacher's model.

    Of a `Transformer` it is a checkpoint in bfloat16: in the layout of the teacher's, with its
    other files, or, if that is an adapter or a `.gguf` file, in Llama's. Of a `NetworkModel` it is
    an adapter in PEFT's layout, in float32.

    Raises:
        CheckpointError: The tokenizer of an adapter or of a `.gguf` file cannot be written.
    """
    if isinstance(teacher.model, NetworkModel):
        _save_adapter(teacher.model, weights, str(teacher.checkpoint.path.resolve()), out)
        return
    folder, checkpoint = teacher.checkpoint.path, teacher.checkpoint
    names = [name for name, _ in teacher.model.named_parameters()]
    if not (folder / "config.json").is_file():
        tensors = {llama_name(name): weights[name] for name in names}
        tokenizer = writable_tokenizer(checkpoint)
        save_with_tokenizer(out, checkpoint.config, tensors, tokenizer, teacher.special.mask)
        return
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name not in ("README.md", *_PACKING):
            shutil.copy(file, out / file.name)
    config = read_json(folder / "config.json")
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if "block_size" in checkpoint.config:  # perhaps from the folder's name (SDAR-8B-Chat-b32)
        changed["block_size"] = checkpoint.config["block_size"]
    if changed != config:
        save_json(out / "config.json", changed)
    in_llada = is_llada(config)
    tensors = {
        f"model.{name}" if in_llada else _stored_name(checkpoint, name): weights[name].bfloat16()
        for name in names
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def _save_adapter(
    model: NetworkModel, weights: Mapping[str, torch.Tensor], base: str, out: Path
) -> None:
    """Write the adapter of the model `base`."""
    tensors, orders = {}, row_orders(model.network)
    for number, name in enumerate(model.names):
        down, up = weights[f"down.{number}"], weights[f"up.{number}"].clone()
        if name in orders:  # adapters have the rows in the order of the checkpoint
            up[torch.from_numpy(orders[name])] = weights[f"up.{number}"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    write_adapter(out, tensors, base, len(model.down[0]), len(model.down[0]), model.names)


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    """The name of a parameter among the tensors of the checkpoint."""
    stored = llama_name(name)
    if "diffusion_head.weight" not in checkpoint.tensors:
        return stored
    if stored == "lm_head.weight":
        return "diffusion_head.weight"
    return f"encoder.{stored.removeprefix('model.')}"  # Nemotron-Labs-Diffusion


def _tensor(checkpoint: Checkpoint, name: str) -> np.ndarray | Weight:
    """The stored tensor of a parameter."""
    stored = _stored_name(checkpoint, name)
    if stored not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.name}: the checkpoint has no tensor {stored!r}")
    return checkpoint.tensors[stored]


def _read_weights(checkpoint: Checkpoint, model: Transformer) -> None:
    needed = {_stored_name(checkpoint, name) for name, _ in model.named_parameters()}
    stored = {name for name in checkpoint.tensors if not name.endswith("rotary_emb.inv_freq")}
    if others := sorted(stored - needed):
        raise OtherLayersError(
            f"{checkpoint.name}: training needs the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE,"
            f" which have no tensor {others[0]!r}"
        )
    for name, parameter in model.named_parameters():
        tensor = _tensor(checkpoint, name)
        values = dequantize(tensor) if isinstance(tensor, Weight) else tensor
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))


def _special_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, spec: ModelSpec) -> SpecialTokens:
    is_noise_random = reads_noise(spec)
    if (tokenizer.mask_id is None and not is_noise_random) or not tokenizer.eos_ids:
        raise CheckpointError(f"{checkpoint.name}: its files name no mask token or no end of text")
    mask, end = tokenizer.mask_id, min(tokenizer.eos_ids)
    if is_noise_random:  # what is no noise is not predicted either
        unused = range(spec.num_noise_tokens or spec.vocab_size, spec.vocab_size)
        mask = -1 if mask is None or mask >= spec.vocab_size else mask
        return SpecialTokens(mask, end, tuple(sorted({*unused, mask} - {-1})))
    pad = text_config(checkpoint.config).get("pad_token_id")
    assert mask is not None
    barred = {mask, *(spec.edit_tokens or ())}
    if isinstance(pad, int) and 0 <= pad and pad not in tokenizer.eos_ids:
        barred.add(pad)
    return SpecialTokens(mask, end, tuple(sorted(barred)))

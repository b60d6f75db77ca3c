"""Block drafters in GGUF files, in the layout of llama.cpp: DFlash (Chen et al., arXiv:2602.06036);
DFlash2, which has convolutions and a selector beside; and DSpark (arXiv:2607.05147), which has a
Markov head and may have a confidence head."""

from __future__ import annotations

from functools import partial
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.limits import MAX_COUNT, MAX_TOKENS, integer
from anydecode.models.loading.gguf_drafters import (
    ROPE_FREQS,
    TAPS,
    TOKENS,
    config_of,
    head_offsets,
)
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_names import LAYER
from anydecode.models.loading.gguf_rope import partial_rotary, windows
from anydecode.models.loading.lazy import LazyTensors, Reader

ARCHITECTURE = "dflash"
_MARKOV, _CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
#: Tensors of a file outside its layers, without their suffix, and their names in safetensors.
_OUTER = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "selector_hidden": "candidate_selector.hidden_projection",
}
#: The same of tensors of DFlash2, whole names: outside the layers, and within one.
_CODEBOOKS = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
_CONVOLUTIONS = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
#: Keys of DFlash2.
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def load_dflash(file: GGUFFile) -> Checkpoint:
    """The drafter of a file, as a checkpoint in the layout of DFlash.

    Raises:
        CheckpointError: A key or a tensor is missing, invalid or unsupported.
    """
    config, path, readers = _config(file), file.path, dict[str, Reader]()
    for info in file.tensors.values():
        if info.name == TOKENS:
            readers[TOKENS] = partial(head_offsets, file)
        elif info.name == _CONFIDENCE:
            readers[_name(file, info)] = partial(_floats, file, info)
        elif info.name != ROPE_FREQS:
            name = _name(file, info)
            readers[name] = partial(file.view, info, name.rpartition(".")[0])
    return Checkpoint(path.stem, path, config, LazyTensors(path, readers))


def _name(file: GGUFFile, info: TensorInfo) -> str:
    """The name of a tensor in safetensors."""
    if info.name in _CODEBOOKS:
        return _CODEBOOKS[info.name]
    number, _, inner = info.name.removeprefix("blk.").partition(".")
    if inner in _CONVOLUTIONS:
        return f"layers.{number}.{_CONVOLUTIONS[inner]}"
    module, _, leaf = info.name.rpartition(".")
    layer, _, part = module.removeprefix("blk.").partition(".")
    is_inner = module.startswith("blk.") and part in LAYER
    name = f"layers.{layer}.{LAYER[part]}" if is_inner else _OUTER.get(module)
    if name is None or leaf not in ("weight", "bias"):
        raise CheckpointError(f"{file.path}: tensor {info.name!r} is unknown in {ARCHITECTURE}")
    return f"{name}.{leaf}"


def _floats(file: GGUFFile, info: TensorInfo) -> Any:
    tensor = file.view(info)
    return dequantize(tensor) if isinstance(tensor, Weight) else tensor


def _config(file: GGUFFile) -> dict[str, Any]:
    keys, mask = Keys(file), "tokenizer.ggml.mask_token_id"
    is_dspark = _MARKOV in file.tensors
    token = integer(f"{file.path}: metadata {mask}", file.metadata.get(mask), 0, MAX_TOKENS)
    block: dict[str, Any] = {"mask_token_id": token}
    for key in _SELECTOR_KEYS:
        block[key] = keys.get(key, None)
    if keys.get("attention.causal", None) is not None:
        block["causal"] = keys.get("attention.causal")
    if keys.get("sample_from_anchor", None) is not None:
        block["sample_from_anchor"] = keys.get("sample_from_anchor")
    if is_dspark:
        block["markov_rank"] = file.tensors[_MARKOV].shape[-1]
        block["confidence_head_with_markov"] = _CONFIDENCE in file.tensors
    kind = "DSpark" if is_dspark else "DFlash2" if block["selector_rank"] else "DFlash"
    config = config_of(keys) | {
        "architectures": [f"{kind}DraftModel"],
        "model_type": "qwen3",
        "block_size": keys.count("block_size", high=MAX_COUNT),
        "aux_hidden_state_layer_ids": keys.get(TAPS),
        "dflash_config": block,
    }
    if keys.get("target_hidden_size", None) is not None:
        config["target_hidden_size"] = keys.count("target_hidden_size")
    partial_rotary(keys, config)
    if keys.get("attention.sliding_window", 0):
        windows(keys, config)
    return config

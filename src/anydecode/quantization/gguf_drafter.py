"""Writes an EAGLE-3 drafter (Li et al., arXiv:2503.01840) as a GGUF file, which llama.cpp's server
opens beside the GGUF file of its target (`--spec-type draft-eagle3 --spec-draft-model FILE`)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.draft_heads import is_draft_head, load_draft_head
from anydecode.models.drafter_files import drafter_config
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_drafters import KEYS, TAPS, TOKENS
from anydecode.models.loading.gguf_eagle3 import ARCHITECTURE, OLDER_TAPS, TENSORS
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.gguf_rope import interleaved
from anydecode.models.network import Network
from anydecode.quantization.gguf import FORMATS, check_target, entry, header_of

#: The name of the first layer in checkpoints that number it.
_NUMBERED = "layers.0."


def export_drafter(drafter: Checkpoint, target: Path, out: Path, overwrite: bool = False) -> int:
    """Write a drafter as a GGUF file in F16, with the tokenizer of its target.

    Args:
        drafter: The drafter's files.
        target: The GGUF file of its target.
        out: The new file, which is complete or not there.
        overwrite: Whether it may exist.

    Returns:
        The size of the file in bytes.

    Raises:
        InvalidRequestError: The target is no GGUF file, or the new file cannot be written.
        CheckpointError: The files are damaged, or the drafter does not fit the target.
        UnsupportedCombinationError: llama.cpp does not run such a drafter.
    """
    if not target.is_file():
        raise InvalidRequestError(
            f"{target}: is no GGUF file; a drafter is exported for a GGUF file, whose tokenizer it"
            " gets"
        )
    check_target(target, out, overwrite)
    if not is_draft_head(drafter):
        raise UnsupportedCombinationError(f"{drafter.path}: is no EAGLE-3 drafter")
    network = load_draft_head(drafter, load_network(load_checkpoint(target)))
    _check(drafter, network)
    tensors = _tensors(drafter, network)
    file = GGUFFile(target)
    entries = {key: file.entry(key) for key in file.metadata if key.startswith("tokenizer.")}
    entries |= {key: entry(key, value) for key, value in _metadata(drafter, network).items()}
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64"}
    plan = {
        name: TensorInfo(name, kinds[one.dtype], one.shape, 0, one.nbytes)
        for name, one in tensors.items()
    }
    header, offsets, size = header_of(entries, plan)
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(header)
            for name, one in tensors.items():
                stream.write(b"\0" * (len(header) + offsets[name] - stream.tell()))
                stream.write(one.tobytes())
        os.replace(part, out)
    except OSError as error:
        raise InvalidRequestError(f"{out}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return size


def _check(drafter: Checkpoint, network: Network) -> None:
    """Raise UnsupportedCombinationError for a drafter that llama.cpp does not run."""
    spec, states = network.spec, network.spec.states
    reason = ""
    if spec.architecture != "Eagle3" or states is None:
        reason = f"is {spec.architecture}; only EAGLE-3 is exported"
    elif spec.num_layers != 1 or states.num_taps != 3:
        reason = f"has {spec.num_layers} layers and reads {states.num_taps}; allowed are 1 and 3"
    elif states.num_target_norms or states.feeds_normed:
        reason = "has norms of the target's states (norm_before_fc, fc_norm, norm_output)"
    elif drafter_config(drafter).get("rope_scaling"):
        reason = "scales rotary frequencies"
    if reason:
        raise UnsupportedCombinationError(f"{drafter.path}: {reason}")


def _metadata(
    drafter: Checkpoint, network: Network
) -> dict[str, str | bool | int | float | list[int]]:
    spec, states, config = network.spec, network.spec.states, drafter_config(drafter)
    attention = spec.layers[0].attention
    assert states is not None and attention is not None
    values = {
        **config,
        "num_hidden_layers": 1,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": config.get("rope_theta", 10000.0),
    }
    found: dict[str, str | bool | int | float | list[int]] = {
        "general.architecture": ARCHITECTURE,
        "general.name": drafter.name,
        "general.file_type": FORMATS["F16"],
        f"{ARCHITECTURE}.vocab_size": spec.vocab_size,
        f"{ARCHITECTURE}.attention.value_length": attention.head_dim,
        f"{ARCHITECTURE}.rope.dimension_count": attention.head_dim,
        f"{ARCHITECTURE}.norm_before_residual": states.has_normed_residual,
        f"{ARCHITECTURE}.target_hidden_size": states.target_size,
    }
    for name, key in KEYS.items():
        kind = float if name in ("rms_norm_eps", "rope_theta") else int
        found[f"{ARCHITECTURE}.{key}"] = kind(values[name])
    return found | {f"{ARCHITECTURE}.{key}": list(states.taps) for key in (TAPS, OLDER_TAPS)}


def _tensors(drafter: Checkpoint, network: Network) -> dict[str, np.ndarray]:
    """The tensors by their names in the file: vectors in float32, matrices in float16."""
    attention = network.spec.layers[0].attention
    assert attention is not None
    heads = {"q_proj": attention.num_heads, "k_proj": attention.num_kv_heads}
    tensors: dict[str, np.ndarray] = {}
    for name in drafter.tensors:
        module, _, leaf = name.rpartition(".")
        if name in (TOKENS, "t2d") or module == "lm_head":
            continue
        stored = TENSORS.get(module.replace(_NUMBERED, "midlayer."))
        if stored is None or leaf != "weight":
            raise UnsupportedCombinationError(
                f"{drafter.path}: llama.cpp has no tensor {name!r} in EAGLE-3 drafters"
            )
        tensor = drafter.tensors[name]
        values = dequantize(tensor) if isinstance(tensor, Weight) else tensor.astype(np.float32)
        if (count := heads.get(module.rpartition(".")[2])) is not None:
            values = interleaved(values, count)
        tensors[f"{stored}.weight"] = values if values.ndim == 1 else values.astype(np.float16)
    tokens = network.weights.head_tokens
    if tokens is not None:
        tensors[TOKENS] = np.asarray(tokens, np.int64)
    if tokens is not None or "lm_head.weight" in drafter.tensors:
        head = dequantize(network.weights.head)
        tensors[f"{TENSORS['lm_head']}.weight"] = head.astype(np.float16)
    return tensors

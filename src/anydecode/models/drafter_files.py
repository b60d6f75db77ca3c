"""What the files of all drafters that read states have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.values import int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import refusal
from anydecode.models.network import Network

#: The rows of a matrix for some tokens, float32 `[tokens, in_features]`.
ReadRows = Callable[[Weight, np.ndarray], np.ndarray]

#: The key with the kind of a drafter in the layout of speculators.
SPECULATORS = "speculators_model_type"


def check_target(checkpoint: Checkpoint, target: Network) -> None:
    """Check that a drafter can read the states of `target`, and that it is one of a target with
    as many tokens and layers, if its config says of how many.

    Raises:
        CheckpointError: It is not.
    """
    if target.has_wide_states:
        raise CheckpointError(
            "drafters cannot read the states of a target with several streams (Gemma 3n) or a"
            " memory (SambaY)"
        )
    config, spec = drafter_config(checkpoint), target.spec
    sizes = {"vocab_size": spec.vocab_size, "num_target_layers": spec.num_layers}
    for key, allowed in sizes.items():
        own = int_value(config, key, allowed)
        if own != allowed:
            raise refusal(key, own, f"{allowed}, as the target's")


def drafter_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys of a drafter's config; in the layout of speculators those of its layers are
    nested."""
    config = dict(checkpoint.config)
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return config
    merged = {**nested, **{key: value for key, value in config.items() if value is not None}}
    merged["model_type"] = nested.get("model_type")
    return merged


def layer_config(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The config of a drafter's layers alone, as of a usual model; `model_type` is the default."""
    model_type = config.get("model_type") or model_type
    return {
        **config,
        "architectures": None,
        "model_type": model_type,
        "tie_word_embeddings": False,
    }


def own_or_target(
    reader: TensorReader,
    name: str,
    shape: tuple[int, int],
    other: Weight,
    packed: list[Weight],
    source: str,
) -> Weight:
    """A drafter's embedding or head.

    Args:
        reader: The drafter's tensors.
        name: "embed_tokens" or "lm_head".
        shape: The shape of the matrix.
        other: The target's, which is used, and added to `packed`, if the drafter has none.
        packed: The matrices of the target that the drafter uses.
        source: The drafter's name, for messages.
    """
    if reader.has(f"{name}.weight"):
        return reader.matrix(name, shape, is_outer=True)
    if other.in_features != shape[1]:
        raise CheckpointError(
            f"{source}: has no {name}, and the target's is for hidden size {other.in_features},"
            f" not {shape[1]}"
        )
    packed.append(other)
    return other


def reduced_head(
    reader: TensorReader,
    tokens: np.ndarray,
    hidden: int,
    other: Weight,
    read_rows: ReadRows,
    source: str,
) -> Weight:
    """The head of a drafter for some tokens: its own, or their rows of the target's.

    Args:
        reader: The drafter's tensors.
        tokens: The tokens of the head's rows.
        hidden: The drafter's hidden size.
        other: The target's head.
        read_rows: Reads rows of it.
        source: The drafter's name, for messages.
    """
    if reader.has("lm_head.weight"):
        return reader.matrix("lm_head", (len(tokens), hidden), is_outer=True)
    if other.in_features != hidden or not np.isin(tokens, range(other.out_features)).all():
        raise CheckpointError(f"{source}: has no lm_head, and the target's does not fit")
    return _rows_of(reader, tokens, other, read_rows)


def _rows_of(reader: TensorReader, tokens: np.ndarray, head: Weight, read_rows: ReadRows) -> Weight:
    rows = plain_weight(read_rows(head, tokens).astype(DTYPES["BF16"]))
    return reader.convert(rows, "lm_head", is_outer=True)


def head_rows(
    reader: TensorReader,
    tokens: np.ndarray | None,
    target: Network,
    read_rows: ReadRows,
    packed: list[Weight],
) -> Weight:
    """The rows of the target's head for some tokens, or the head, which is added to `packed`, where
    `tokens` is None. Arguments as for `reduced_head`."""
    head = target.weights.head
    if tokens is None:
        packed.append(head)
        return head
    return _rows_of(reader, tokens, head, read_rows)


def mapped_tokens(checkpoint: Checkpoint, vocab_size: int) -> np.ndarray | None:
    """The tokens of the rows of a head, int64, as `token_map` tells them; None for all."""
    stored = checkpoint.tensors.get("token_map")
    if stored is None:
        return None
    tokens = np.asarray(stored)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise CheckpointError(
            f"{checkpoint.name}: token_map is {tokens.dtype} of shape {tokens.shape}, not a list of"
            " tokens"
        )
    tokens = tokens.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
        raise CheckpointError(
            f"{checkpoint.name}: its token_map has {len(tokens)} tokens from {tokens.min()} to"
            f" {tokens.max()}, {len(np.unique(tokens))} of them different; allowed are different"
            f" ones of the target, 0 to {vocab_size - 1}"
        )
    return tokens


def head_tokens(checkpoint: Checkpoint, size: int, vocab_size: int) -> np.ndarray:
    """The tokens of the `size` rows of a head, int64, below `vocab_size`.

    d2t has their offsets from the row's number, as vLLM, SGLang and SpecForge read it; in some
    files the tokens themselves. t2d tells which; without it, they are offsets unless these name no
    different tokens of the vocabulary.
    """
    stored, name = np.asarray(checkpoint.tensors["d2t"]), checkpoint.name
    if stored.shape != (size,) or stored.dtype.kind not in "iu":
        raise CheckpointError(
            f"{name}: d2t is {stored.dtype} of shape {stored.shape}, not {size} integers"
        )
    stored = stored.astype(np.int64)
    kept = None
    if "t2d" in checkpoint.tensors:
        kept = np.flatnonzero(np.asarray(checkpoint.tensors["t2d"]))
    tokens: np.ndarray
    for tokens in (stored + np.arange(size), stored):
        ordered = np.sort(tokens)
        if kept is not None:
            is_fitting = np.array_equal(ordered, kept)
        else:
            is_distinct = bool((np.diff(ordered) > 0).all())
            is_fitting = is_distinct and ordered[0] >= 0 and ordered[-1] < vocab_size
        if is_fitting:
            return tokens
    if kept is not None:
        raise CheckpointError(f"{name}: d2t and t2d name different tokens")
    raise CheckpointError(
        f"{name}: d2t has neither the offsets of {size} different tokens below {vocab_size} from"
        " their rows nor the tokens"
    )

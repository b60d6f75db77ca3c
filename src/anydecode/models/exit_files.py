"""Files of what is trained for exits or layers of one model: routers, predictors and heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: Tensors by number of layers before the exit, or before the layer.
ByExit = dict[int, np.ndarray]


def write_exits(path: Path, parts: dict[str, ByExit], fingerprint: str, target: str = "") -> None:
    """Write a safetensors file with the tensors `layers.NUMBER.PART`, the fingerprint of the model
    that they are for, and what they have learned to predict, if there is a choice."""
    from safetensors.numpy import save_file

    tensors = {
        f"layers.{exit}.{part}": np.ascontiguousarray(tensor)
        for part, tensors in parts.items()
        for exit, tensor in tensors.items()
    }
    save_file(tensors, path, metadata={"fingerprint": fingerprint, "target": target})


def read_exits(
    path: Path, parts: Seq[str], what: str, *optional: Seq[str]
) -> tuple[list[ByExit], dict[str, str]]:
    """Read the file that `write_exits` writes.

    Args:
        path: The file.
        parts: The parts of each exit or layer.
        what: What the file has, for errors.
        *optional: Groups of further parts: a file has all parts of a group, or none.

    Returns:
        The tensors of each part, float32, the optional ones last and empty where the file has none,
        and the fingerprint and the target, by these names; "" where the file has none.

    Raises:
        CheckpointError: There is no such file, or it has other tensors or numbers that are not
            finite.
    """
    tensors, metadata = read_tensors(path, what)
    found: dict[str, ByExit] = {part: {} for group in (parts, *optional) for part in group}
    try:
        for name, tensor in tensors.items():
            _, exit, part = name.split(".", 2)
            found[part][int(exit)] = tensor
    except (ValueError, KeyError):
        raise CheckpointError(f"{what} {path}: has an unknown tensor {name}") from None
    used = [*parts]
    for group in optional:
        used += group if any(found[part] for part in group) else ()
    first, *others = (found[part] for part in used)
    if not (first and all(one.keys() == first.keys() for one in others)):
        raise CheckpointError(f"{what} {path}: the tensors do not fit together")
    return list(found.values()), {"fingerprint": "", "target": "", **metadata}


def network_of(model: Any, lacks: str) -> Network:
    """The network of a model that is a transformer. Raises UnsupportedCombinationError if it is
    none, which then has no `lacks`."""
    network: Network | None = getattr(model, "network", None)
    if network is None:
        raise UnsupportedCombinationError(f"{model.name} has no {lacks}")
    return network


def check_model(
    fingerprint: str,
    network: Network,
    what: str,
    command: str,
    *,
    widths: Iterable[int] = (),
    layers: Iterable[int] = (),
) -> None:
    """Raise InvalidRequestError unless something trained is that of `network`, and fits it.

    Args:
        fingerprint: The fingerprint of the model that it was trained for.
        network: The model.
        what: What was trained, for errors: "exit routers".
        command: What `anydecode train` makes it with.
        widths: How many numbers its parts read, or make, of each state.
        layers: Its layers or exits, counted from 0.
    """
    if fingerprint != model_fingerprint(network):
        raise InvalidRequestError(
            f"these {what} are those of another model; `anydecode train {command}` makes some for"
            " this one"
        )
    depth, hidden = network.spec.num_layers, network.spec.hidden_size
    if not {hidden}.issuperset(widths) or not all(0 <= layer < depth for layer in layers):
        raise InvalidRequestError(
            f"the {what} do not fit a model of {depth} layers with states of {hidden} numbers"
        )


def model_fingerprint(network: Network) -> str:
    """A hash of the shape and the last norm, which no number format changes."""
    spec = network.spec
    return fingerprint(
        spec.num_layers, spec.hidden_size, spec.vocab_size, network.weights.final_norm
    )


def fingerprint(num_layers: int, hidden_size: int, vocab_size: int, norm: Any) -> str:
    """See `model_fingerprint`."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((num_layers, hidden_size, vocab_size)).encode())
    if norm is not None:
        digest.update(np.asarray(norm, np.float16).tobytes())
    return digest.hexdigest()

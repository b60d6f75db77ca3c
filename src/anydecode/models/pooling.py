"""How the states of a text become its embedding, as a repository says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.files import read_json, read_text, untrusted
from anydecode.models.limits import MAX_SIZE, integer
from anydecode.models.tensor_file import read_tensors

#: The poolings, by their names in the configs of sentence-transformers.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
#: Modules of sentence-transformers that are applied.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = {"Identity": None, "Tanh": np.tanh}


@dataclass(frozen=True, eq=False)
class DenseModule:
    """A linear map of a pooled state: `weight` is float32 `[outputs, inputs]`."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    activation: Callable[[np.ndarray], np.ndarray] | None = None

    def apply(self, x: np.ndarray) -> np.ndarray:
        y: np.ndarray = self.weight @ x
        y = y if self.bias is None else y + self.bias
        return y if self.activation is None else self.activation(y)


@dataclass(frozen=True)
class Pooling:
    """How an embedding is computed from the states of the last layer.

    Attributes:
        mode: "mean" of all states, the first one ("cls") or the "last".
        is_normalized: Whether embeddings are scaled to length 1.
        prompts: Texts by name ("query", "document"), one of which is put before a text.
        default_prompt: The name of the prompt that is used if none is chosen.
        dimensions: Lengths that embeddings may be cut to (Matryoshka representations, Kusupati et
            al., arXiv:2205.13147); None for any length; empty for the full length only.
        max_tokens: The length of the texts that the model was trained for, if the repository says.
        dense: Maps that are applied to the pooled state, in this order.
    """

    mode: str = "mean"
    is_normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: tuple[int, ...] | None = ()
    max_tokens: int | None = None
    dense: tuple[DenseModule, ...] = ()

    def rows(self, num_tokens: int) -> list[int]:
        """The rows whose states are pooled."""
        if self.mode == "mean":
            return list(range(num_tokens))
        return [0 if self.mode == "cls" else num_tokens - 1]

    def width(self, hidden_size: int) -> int:
        """The length of embeddings of states `[hidden_size]`."""
        return len(self.dense[-1].weight) if self.dense else hidden_size

    def prompt(self, name: str | None) -> str:
        """The text that is put before a text.

        Args:
            name: A name in `prompts`; None for the default.

        Raises:
            InvalidRequestError: There is no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequestError(f"prompt_name is {name!r}; this model's prompts are: {known}")
        return self.prompts[name]

    def check_dimensions(self, dimensions: int | None, hidden_size: int) -> None:
        """Check that embeddings of states `[hidden_size]` may be cut to `dimensions`.

        Raises:
            InvalidRequestError: They may not.
        """
        hidden_size = self.width(hidden_size)
        if dimensions in (None, hidden_size):
            return
        if self.dimensions is None and 1 <= dimensions <= hidden_size:
            return
        if self.dimensions and dimensions in self.dimensions:
            return
        allowed = str(hidden_size)
        if self.dimensions is None:
            allowed = f"1 to {hidden_size}"
        elif self.dimensions:
            allowed = ", ".join(map(str, sorted({*self.dimensions, hidden_size})))
        raise InvalidRequestError(
            f"dimensions is {dimensions}; this model's embeddings have {allowed}"
        )

    def vector(self, state: np.ndarray, dimensions: int | None = None) -> np.ndarray:
        """The embedding of a pooled state `[hidden_size]`, cut to `dimensions`."""
        vector = state
        for module in self.dense:
            vector = module.apply(vector)
        vector = vector if dimensions is None else vector[:dimensions]
        if not self.is_normalized:
            return vector
        unit: np.ndarray = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return unit


def with_projection(pooling: Pooling | None, weight: np.ndarray, hidden_size: Any) -> Pooling:
    """The pooling with a matrix before its dense modules: that of the model's states (equal to one
    of the pooled state).

    Raises:
        CheckpointError: It is no matrix of states.
    """
    pooling = pooling or Pooling()
    if weight.ndim != 2 or weight.shape[1] != hidden_size or weight.dtype.kind not in "fV":
        raise CheckpointError(
            f"embedding_projection.weight is {weight.dtype} of shape {list(weight.shape)}; allowed"
            f" is a matrix of {hidden_size} inputs"
        )
    first = DenseModule(weight.astype(np.float32))
    return replace(pooling, dense=(first, *pooling.dense))


def read_pooling(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """The pooling of a repository with the `modules.json` of sentence-transformers; None without.

    Raises:
        CheckpointError: A file is malformed, or a module or a pooling is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        modules = json.loads(read_text(path))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise CheckpointError(f"{path}: not a list of modules") from None
    for kind in kinds:
        if kind not in _MODULES:
            raise CheckpointError(
                f"{path}: the module {kind!r} is not supported; supported are {', '.join(_MODULES)}"
            )
    if "Pooling" not in kinds:
        return None
    places = [str(module.get("path") or "") for module in modules]
    for place in places:
        if not (folder / place).resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path}: the path {place!r} is outside the folder")
    place = places[kinds.index("Pooling")]
    dense = [folder / at for at, kind in zip(places, kinds, strict=True) if kind == "Dense"]
    settings = read_json(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise CheckpointError(
            f"{folder}: prompts in config_sentence_transformers.json are no texts"
        )
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{folder}: default_prompt_name {default!r} is not in prompts")
    return Pooling(
        mode=_mode(folder / place / "config.json"),
        is_normalized="Normalize" in kinds,
        prompts=prompts,
        default_prompt=default,
        dimensions=_dimensions(config),
        max_tokens=_max_tokens(folder / "sentence_bert_config.json"),
        dense=_read_dense(dense, config.get("hidden_size") or config.get("dim")),
    )


def _read_dense(folders: list[Path], size: Any) -> tuple[DenseModule, ...]:
    """The dense modules in `folders`, from and to states of the hidden size `size`."""
    found, width = [], size
    for folder in folders:
        name = str(read_json(folder / "config.json").get("activation_function"))
        name = name.rpartition(".")[2]
        if name not in _ACTIVATIONS:
            allowed = ", ".join(_ACTIVATIONS)
            raise CheckpointError(f"{folder}: activation {name!r}; supported are {allowed}")
        file, what = folder / "model.safetensors", "the dense module"
        tensors, _ = read_tensors(file, what, ["linear.weight"])
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
        if weight.ndim != 2 or weight.shape[1] != width:
            raise CheckpointError(f"{folder}: linear.weight is no matrix of {width} inputs")
        width = len(weight)
        if bias is not None and bias.shape != (width,):
            raise CheckpointError(f"{folder}: linear.bias is no vector of {width} numbers")
        found.append(DenseModule(weight, bias, _ACTIVATIONS[name]))
    if width != size:
        raise CheckpointError(
            f"{folders[-1]}: dense modules with {width} outputs; allowed are {size}"
        )
    return tuple(found)


def _max_tokens(path: Path) -> int | None:
    """The maximum number of tokens of an input."""
    length = read_json(path).get("max_seq_length")
    with untrusted(path):
        return None if length is None else integer("max_seq_length", length)


def _mode(path: Path) -> str:
    """The pooling mode of a config of sentence-transformers, in either of its two forms."""
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is not None:
        chosen = [named] if isinstance(named, str) else list(named)
    else:
        chosen = [
            name for name in config if name.startswith("pooling_mode_") and config[name] is True
        ]
    modes = [_MODES.get(name) or _NAMES.get(name) for name in chosen]
    if len(modes) != 1 or modes[0] is None:
        names = ", ".join(map(str, chosen)) or "none"
        raise CheckpointError(
            f"{path}: the pooling is {names}; supported is one of mean, cls and last token"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(
            f"{path}: pooling without the prompt (include_prompt) is not supported"
        )
    return modes[0]


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The lengths that embeddings may be cut to, see `Pooling`."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list):
        return tuple(integer("matryoshka_dimensions", size, 1, MAX_SIZE) for size in listed)
    return None if config.get("is_matryoshka") is True else ()

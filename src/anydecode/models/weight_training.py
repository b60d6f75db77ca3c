"""Training of a model's own weights while it runs."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np

from anydecode.kernels.formats import DTYPES, dequantize
from anydecode.kernels.gradients import Tape, Variable
from anydecode.kernels.interface import Weight
from anydecode.models.families import load_network
from anydecode.models.linear import Linear
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import GatedMlp, LayerWeights, ModelWeights, Network
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.models.transformer import Transformer


class TrainedWeights:
    """A copy of a model's weights in float32 that is trained, and written back to the model.

    Args:
        model: The model, for which `can_train` is true.

    Attributes:
        parameters: The arrays of weights by name, to be changed in place.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._formats: dict[int, str] = {}  # of the matrices, by id
        source = model.network
        if not _has_data(source):
            assert model.path is not None, "checked by `can_train`"
            source = load_network(load_checkpoint(model.path), model.dtype)
        self.network = self._float32(source)
        self.parameters = _arrays(self.network.weights)
        self._original = {name: array.copy() for name, array in self.parameters.items()}

    def logits(self, tokens: np.ndarray, first: int) -> tuple[Tape, Variable]:
        """The logits `[rows, vocab_size]` of a text at the positions from `first` on, and the tape
        on which the gradients can be computed."""
        network, spec = self.network, self.network.spec
        tape = Tape(np.arange(first, first + len(tokens)))
        backend: Any = tape
        x: Any = tape.embed(tokens, network.weights.embedding.data, spec.embedding_scale)
        for layer in range(spec.num_layers):
            x = network.layer(backend, x, layer)
        return tape, network.head(backend, x)

    def gradients(self, tape: Tape) -> dict[str, np.ndarray]:
        """The gradients on a tape by the names of `parameters`."""
        return {
            name: tape.gradients[id(array)]
            for name, array in self.parameters.items()
            if id(array) in tape.gradients
        }

    def publish(self) -> None:
        """Let the model run with the present weights, in their own formats, from its next pass
        on."""
        self.model.replace_weights(self._served())

    def reset(self) -> None:
        """Restore the weights from before the training."""
        for name, array in self.parameters.items():
            array[...] = self._original[name]
        self.publish()

    def _float32(self, source: Network) -> Network:
        def convert(weight: Weight) -> Weight:
            data = dequantize(weight).copy()
            converted = replace(weight, format="F32", data=data, scale=1.0)
            self._formats[id(converted)] = weight.format
            return converted

        return _mapped(source, convert, np.copy)

    def _served(self) -> Network:
        def convert(weight: Weight) -> Weight:
            format = self._formats[id(weight)]
            return replace(weight, format=format, data=weight.data.astype(DTYPES[format]))

        return _mapped(self.network, convert, np.copy)


def can_train(model: object) -> bool:
    """Whether `TrainedWeights` can train a model: a transformer with attention, rotary positions,
    RMS norms and gated MLPs, whose matrices are floating point numbers that can still be read."""
    if not isinstance(model, Transformer) or not _has_simple_shape(model.spec):
        return False
    if model.network.adapters or model.dtype not in (None, "float32", "bfloat16"):
        return False
    if any(weight.format not in DTYPES for weight in model.network.matrices()):
        return False
    return _has_data(model.network) or model.path is not None


def has_only(value: Any, names: set[str]) -> bool:
    """Whether all fields of a dataclass but these have their defaults."""
    others = [one for one in fields(value) if one.name not in names]
    return all(getattr(value, one.name) == one.default for one in others)


def num_parameters(model: Transformer) -> int:
    """Number of the weights in the matrices of a model."""
    matrices = {id(weight): weight for weight in model.network.matrices()}.values()
    return sum(weight.out_features * weight.in_features for weight in matrices)


def _has_data(network: Network) -> bool:
    return all(weight.data.size for weight in network.matrices())


def _has_simple_shape(spec: ModelSpec) -> bool:
    sizes = {"architecture", "vocab_size", "hidden_size", "max_positions", "norm_eps", "layers"}
    factors = {"embedding_scale", "logit_scale", "residual_scale"}
    return has_only(spec, sizes | factors) and all(map(_has_simple_layer, spec.layers))


def _has_simple_layer(layer: LayerSpec) -> bool:
    attention, rope = layer.attention, layer.rope
    if attention is None or (rope is not None and rope.growth) or layer.norms == "sum":
        return False
    positions = {"rope", "norms", "qk_norm", "norm_after_rope", "interleaved_rope"}
    heads = {"num_heads", "num_kv_heads", "head_dim", "scale"}
    return has_only(layer, {"attention", *positions}) and has_only(attention, heads)


def _mapped(network: Network, matrix: Any, vector: Any) -> Network:
    """A copy of a network; `matrix` converts its matrices, `vector` its arrays."""
    known: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(one) for one in value]
        if id(value) not in known:
            known[id(value)] = _convert(value)
        return known[id(value)]

    def _convert(value: Any) -> Any:
        if isinstance(value, Weight):
            return matrix(value)
        if isinstance(value, np.ndarray):
            return vector(value)
        if isinstance(value, Linear | GatedMlp | LayerWeights | ModelWeights):
            result = copy(value)
            for one in fields(value):
                setattr(result, one.name, convert(getattr(value, one.name)))
            return result
        return value

    return Network(network.spec, convert(network.weights))


def _arrays(weights: ModelWeights) -> dict[str, np.ndarray]:
    """Every array of weights, by the path of its fields."""
    found: dict[int, tuple[str, np.ndarray]] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, Weight):
            value = value.data
        if isinstance(value, np.ndarray):
            found.setdefault(id(value), (path, value))
        elif isinstance(value, list):
            for number, one in enumerate(value):
                collect(one, f"{path}.{number}")
        elif isinstance(value, Linear | GatedMlp | LayerWeights | ModelWeights):
            for one in fields(value):
                collect(getattr(value, one.name), f"{path}.{one.name}")

    collect(weights, "weights")
    return dict(found.values())

"""Opens the modules that predict further tokens inside a model's checkpoint (multi-token
prediction).

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437. Layouts: those of DeepSeek-V3 and V4,
GLM-4.5, GLM-5.3 and Kimi K3, of Ling and Hy3, of Step-3.5, of Qwen3-Next and Qwen3.5, of Qwen3.8,
of MiMo, MiMo-V2-Flash and MiMo-V2.5, of LongCat-Flash, of Hy4, and of speculators.

A module is one layer of the model's kind over a projection of the normed embedding of a token and
the normed state before it. Its output after its norm is the state of the next token. Of several
modules, the first drafts all tokens. Those of MiMo-V2-Flash and MiMo-V2.5 have a window and no
experts, whatever the model's last layer has, and each drafts the token that it was trained for:
module i (from 0) reads a token and the target's state i + 1 positions before it, without the
target's final norm, as in SGLang and llama.cpp. The modules of Step-3.5 have a window, no experts
and such states too.

The layers of Hy4's, GLM-5.3's and Kimi K3's modules have one stream of hidden states, whatever
those of the model have, and read what is left of the target's streams after its last layer: those
of Kimi K3 without the final norm, as in vLLM. The layers of Qwen3.8's and of DeepSeek-V4's have the
streams of the model, and read those of the target: the projection reads each beside the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES as FLOATS
from anydecode.kernels.formats import dequantize, plain_weight
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafter_files import check_target
from anydecode.models.families.build import read_layer
from anydecode.models.families.config import spec_from_config, text_config
from anydecode.models.families.ngrams import read_stream_gates
from anydecode.models.families.shared_key import read_last_hyper_weights
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import mapping_value, num_layers
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import refusal
from anydecode.models.linear import Linear
from anydecode.models.network import ModelWeights, Network
from anydecode.models.spec import MAX_MODULES, ModelSpec, StateSpec
from anydecode.models.states import StateWeights

_NESTED = "transformer_layer_config"  # of speculators
_MLP_NORM = "post_attention_layernorm"
#: What configs say of a layer with a window and without experts, in lists of all layers.
_WINDOWED = {
    "hybrid_layer_pattern": 1,
    "layer_types": "sliding_attention",
    "moe_layer_freq": 0,
    "mlp_layer_types": "dense",
    "swiglu_limits": 0.0,
    "swiglu_limits_shared": 0.0,
}
#: The same of DeepSeek-V4's layers, which all have experts.
_WITHOUT_ENTRIES = {
    "layer_types": "sliding_attention",
    "compress_ratios": 0,
    "mlp_layer_types": "moe",
}
#: The prefix under which `_Tensors` shows the module's own tensors.
_MODULE = "model.mtp_module."


@dataclass(frozen=True)
class _Layout:
    """Where a module's tensors are.

    Attributes:
        layer: The prefix of its layer.
        module: The prefix of the others, whose names follow.
        projection: The projection, or that of the embedding and that of the state.
        norm: The last norm; empty: what reads the streams takes its place.
        head: The head; the target's, if there is none of this name.
        state_first: Whether the projection reads the state before the embedding.
        mlp_norm: The norm of the MLP's inputs.
        mlp: The layer's MLP.
        is_windowed: Whether the layer has a window and no experts, which the config of the model
            does not say (MiMo-V2, whose further modules draft further tokens, and Step-3.5).
        has_hyper: Whether the layer has the streams of the model and their hyper-connections, and a
            window without entries (DeepSeek-V4).
    """

    layer: str
    module: str
    embedding_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"
    state_first: bool = False
    mlp_norm: str = _MLP_NORM
    mlp: str = "mlp"
    is_windowed: bool = False
    has_hyper: bool = False


@dataclass(eq=False)
class MtpNetwork(Network):
    """A module, and the `further` ones that draft the tokens behind its own."""

    further: list[Network] = field(default_factory=list)


def has_mtp(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a module that predicts further tokens."""
    return _layout(checkpoint.tensors) is not None


def is_mtp(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has such a module without its model."""
    has_model = any(name.startswith("model.layers.0.") for name in checkpoint.tensors)
    return not has_model and has_mtp(checkpoint)


def load_mtp(checkpoint: Checkpoint, target: Network, dtype: str | None = None) -> Network:
    """The module of a checkpoint, with the further ones of MiMo-V2. Arguments and errors as for
    `load_draft_head`."""
    with untrusted(checkpoint.path):
        if target.spec.predicts_streams:  # a memory is no part of the last states
            check_target(checkpoint, target)
        first = _Mtp(checkpoint, target, dtype)
        network = first.read()
        for number in range(1, MAX_MODULES if first.layout.is_windowed else 1):
            layout = _windowed_layout(checkpoint.tensors, number)
            if layout is None:
                break
            network.further.append(_Mtp(checkpoint, target, dtype, layout, number).read())
        return network


def _windowed_layout(names: Mapping[str, Any], number: int) -> _Layout | None:
    """Where the module `number` of MiMo-V2 is."""
    prefix = f"model.mtp.layers.{number}."
    if f"{prefix}eh_proj.weight" not in names:
        return None
    norm, mlp_norm = "final_layernorm", "pre_mlp_layernorm"
    return _Layout(prefix, prefix, norm=norm, mlp_norm=mlp_norm, is_windowed=True)


def _layout(names: Mapping[str, Any]) -> _Layout | None:
    if "mtp.fc_hidden.weight" in names:
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        return _Layout("mtp.layers.0.", "mtp.", *norms, "fc_embedding fc_hidden", "")
    if "mtp.fc.weight" in names:
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        return _Layout("mtp.layers.0.", "mtp.", *norms, "fc", "norm")
    for prefix in ("model.mtp_layers.0.", "mtp_layers.0."):
        if f"{prefix}input_proj.weight" in names:
            norms = ("token_layernorm", "hidden_layernorm")
            return _Layout(
                prefix, prefix, *norms, "input_proj", "final_layernorm", state_first=True
            )
        if f"{prefix}eh_proj.weight" in names:
            return _Layout(prefix, prefix, norm="final_layernorm")
    prefix, own = "model.mtp.layers.0.", "layers.0."
    if f"{prefix}enorm.m.weight" in names:
        norms = (f"{own}enorm.m", f"{own}hnorm.m")
        mlp = "transformer_layer.mlp"
        return _Layout(prefix, "model.mtp.", *norms, f"{own}eh_proj", "norm", mlp=mlp)
    if (layout := _windowed_layout(names, 0)) is not None:
        return layout
    pattern = re.compile(r"(model\.layers\.(\d+)\.)eh?_proj\.weight")
    found = map(pattern.fullmatch, names)
    layers = sorted((int(match[2]), match[1]) for match in found if match)
    if not layers:
        return None
    prefix, norm = layers[0][1], "shared_head.norm"
    start = "transformer.shared_head"  # of Step-3.5
    if f"{prefix}{start}.norm.weight" in names:
        return _Layout(
            prefix, prefix, norm=f"{start}.norm", head=f"{start}.output", is_windowed=True
        )
    if f"{prefix}hc_head.hc_fn" in names:
        return _Layout(prefix, prefix, projection="e_proj h_proj", has_hyper=True)
    if f"{prefix}final_layernorm.weight" in names:  # of Ling 2 and 3, and of Hy3
        norm = "final_layernorm"
    elif f"{prefix}hyper_connection_mixer.hc_norm.weight" in names:  # of Qwen3.8 in GGUF
        norm = ""
    return _Layout(prefix, prefix, norm=norm)


class _Tensors(Mapping[str, "np.ndarray | Weight"]):
    """A checkpoint's tensors with those of a module under the names of layer `index`."""

    def __init__(self, tensors: Mapping[str, Any], layout: _Layout, index: int) -> None:
        self._tensors = tensors
        layer = f"model.layers.{index}."
        self._prefixes = {
            f"{layer}{_MLP_NORM}.": f"{layout.layer}{layout.mlp_norm}.",
            f"{layer}mlp.": f"{layout.layer}{layout.mlp}.",
            layer: layout.layer,
            _MODULE: layout.module,
        }

    def _stored(self, name: str) -> str:
        for prefix, stored in self._prefixes.items():
            if name.startswith(prefix):
                return stored + name[len(prefix) :]
        return name

    def __getitem__(self, name: str) -> np.ndarray | Weight:
        stored = self._stored(name)
        if stored not in self._tensors:
            raise KeyError(name)
        tensor: np.ndarray | Weight = self._tensors[stored]
        return tensor

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._stored(name) in self._tensors

    def __iter__(self) -> Iterator[str]:
        for name in self._tensors:
            yield name
            pairs = self._prefixes.items()
            yield from (p + name[len(s) :] for p, s in pairs if name.startswith(s))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _with_window(config: dict[str, Any], kinds: Mapping[str, Any] = _WINDOWED) -> dict[str, Any]:
    """The config of a model with one more layer, of which lists of all layers have `kinds`."""
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": _with_window(config["text_config"], kinds)}
    count = num_layers(config)
    longer = {
        key: [*value[:count], value[count] if len(value) > count else kinds[key]]
        for key, value in config.items()
        if key in kinds and isinstance(value, list)
    }
    if isinstance(config.get("mlp_only_layers"), list):  # of GGUF files
        longer["mlp_only_layers"] = [*config["mlp_only_layers"], count]
    return {**config, **longer, "num_hidden_layers": count + 1}


def _unselected(attention: Attention) -> Attention:
    """The attention to all positions."""
    return replace(
        attention,
        top_k=None,
        index_dim=None,
        index_block=1,
        local_blocks=0,
        num_selections=1,
        has_block_keys=False,
    )


class _Mtp:
    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Network,
        dtype: str | None,
        layout: _Layout | None = None,
        number: int = 0,
    ) -> None:
        layout, self.number = layout or _layout(checkpoint.tensors), number
        assert layout is not None, "checked by `has_mtp`"
        config: dict[str, Any] = dict(checkpoint.config)
        if _NESTED in config:
            config = {**mapping_value(config, _NESTED), "architectures": None}
        if layout.is_windowed:
            config = _with_window(config)
        elif layout.has_hyper:
            config = _with_window(config, _WITHOUT_ENTRIES)
        self.target, self.layout, self.name = target, layout, checkpoint.name
        self.whole = spec_from_config(config, dtype=dtype)
        self.has_streams = self.whole.stream_gate_rank > 0 or layout.has_hyper
        self.is_raw = layout.is_windowed or self.whole.residual_block > 0 or self.has_streams
        self.config = text_config(config)
        self.family = FAMILIES[self.config["model_type"]]
        self.index = self._layer_index()
        self.base = self._base_spec()
        tensors = _Tensors(checkpoint.tensors, layout, self.index)
        view = replace(checkpoint, config=config, tensors=tensors)
        name = self.family.names.get("embed_tokens", "embed_tokens")
        self.reader = TensorReader(view, dtype, name)

    def _layer_index(self) -> int:
        """A layer of the model of the module's kind: the last one with attention alone, whose
        positions are its own."""
        for key in ("vocab_size", "hidden_size", *(["num_streams"] if self.has_streams else [])):
            own, allowed = getattr(self.whole, key), getattr(self.target.spec, key)
            if own != allowed:
                raise refusal(key, own, f"{allowed}, as the target's")
        if self.layout.is_windowed:
            layer = self.whole.layers[-1]
            if layer.attention is None or layer.attention.window is None or layer.num_experts:
                raise CheckpointError(
                    f"{self.name}: the module needs lists of the model's layers with windows"
                    " and without experts (hybrid_layer_pattern and moe_layer_freq, or layer_types)"
                )
            return self.whole.num_layers - 1
        if self.layout.has_hyper:
            attention = self.whole.layers[-1].attention
            if attention is None or attention.window is None or attention.entry_size is not None:
                raise CheckpointError(
                    f"{self.name}: the module needs a list of the model's kinds of layers"
                    " (compress_ratios)"
                )
            return self.whole.num_layers - 1
        for index in reversed(range(self.whole.num_layers)):
            layer = self.whole.layers[index]
            if layer.attention is None or layer.recurrence is not None:
                continue
            if layer.attention.top_k is None or layer.indexer is not None:
                return index
        raise CheckpointError("a model without attention has no module that predicts tokens")

    def read(self) -> MtpNetwork:
        """The drafter's network."""
        embedding, hidden = self.target.weights.embedding, self.whole.hidden_size
        packed, head = [embedding], self.target.weights.head
        if self._has(self.layout.head):
            shape = (self.whole.vocab_size, hidden)
            head = self.reader.matrix(self._own(self.layout.head), shape, is_outer=True)
        else:
            packed.append(head)
        layer = read_layer(self.reader, self.base, self.config, self.index)
        norm = self._norm(self.layout.norm, hidden) if self.layout.norm else None
        weights = ModelWeights(embedding, [layer], norm, head)
        if self.layout.has_hyper:
            weights.hyper = read_last_hyper_weights(self.reader, self.base, self._own("hc_head"))
        elif self.has_streams:
            name = self._own("hyper_connection_mixer")
            weights.stream_gates = read_stream_gates(
                self.reader, name, self.whole, has_factors=False
            )
        weights.states = StateWeights(
            projection=self._projection(),
            embedding_norm=self._norm(self.layout.embedding_norm, hidden),
            state_norm=self._state_norm(),
        )
        return MtpNetwork(self._spec(), weights, packed=tuple(packed))

    def _base_spec(self) -> ModelSpec:
        """The model's architecture with the module's layer in place of that of its kind. The
        drafter's cache lacks positions, but keys of blocks need all: where an indexer has these,
        the module attends to all positions, as in llama.cpp."""
        layers = list(self.whole.layers)
        layer = layers[self.index]
        if layer.attention is not None and layer.attention.has_block_keys:
            layer = replace(layer, attention=_unselected(layer.attention), indexer=None)
        layers[self.index] = layer
        count = self.whole.num_streams if self.has_streams else 1
        hyper = self.whole.hyper if self.layout.has_hyper else None
        own = replace(self.whole, hyper=hyper, residual_block=0, num_streams=count)
        return replace(own, layers=tuple(layers))

    def _spec(self) -> ModelSpec:
        target = self.target.spec
        states = StateSpec(
            (target.num_layers,) if self.is_raw else (),
            target.hidden_size * self.base.num_streams,
            has_norms=True,
            norms_streams=self.layout.has_hyper,
            feeds_normed=not self.is_raw,
            delay=self.number,
        )
        return replace(
            self.base,
            architecture="MTP",
            layers=(replace(self.base.layers[self.index], memory=None),),
            memory_size=0,
            states=states,
            max_positions=target.max_positions,
        )

    def _own(self, name: str) -> str:
        return f"mtp_module.{name}"

    def _has(self, name: str) -> bool:
        return self.reader.has(f"{self._own(name)}.weight")

    def _norm(self, name: str, size: int) -> np.ndarray:
        return self.reader.vector(f"{self._own(name)}.weight", size, self.family.norm_offset)

    def _state_norm(self) -> np.ndarray:
        """The norm of a state, or the same of each stream, or that of all of them as one."""
        hidden, count = self.whole.hidden_size, self.base.num_streams
        if self.layout.has_hyper:
            return np.tile(self._norm(self.layout.state_norm, hidden), count)
        return self._norm(self.layout.state_norm, hidden * count)

    def _projection(self) -> Linear:
        """The projection of embedding and state, in this order."""
        hidden, name = self.whole.hidden_size, self._own(self.layout.projection)
        names = self.layout.projection.split()
        if len(names) > 1:
            parts = [
                self.reader.matrix(self._own(part), (hidden, hidden), keep_format=True)
                for part in names
            ]
            rows = np.concatenate([dequantize(part) for part in parts], 1)
            dtype = FLOATS.get(parts[0].format, FLOATS["F32"])
            return Linear(self.reader.convert(plain_weight(rows.astype(dtype)), name))
        if not self.layout.state_first:
            return self.reader.linear(name, (hidden, 2 * hidden), False)
        stored = self.reader.matrix(name, (hidden, 2 * hidden), keep_format=True)
        state, embedding = np.split(stored.data, 2, 1)
        data = np.concatenate([embedding, state], 1)
        return Linear(self.reader.convert(replace(stored, data=data), name))

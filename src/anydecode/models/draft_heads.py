"""Opens drafters that read the states of their target, by their files: EAGLE, EAGLE-2, EAGLE-3,
P-EAGLE, ParallelSpec and Falcon (DFlash and DSpark: `models/block_drafters.py`).

EAGLE: Li et al., arXiv:2401.15077 and arXiv:2406.16858. EAGLE-3: arXiv:2503.01840. P-EAGLE:
arXiv:2602.01469. ParallelSpec: arXiv:2410.05589. Falcon: arXiv:2412.12639. Layouts: those of
SafeAILab/EAGLE, SpecForge, speculators and Bestpay-inc/Falcon; that of ParallelSpec, of which no
files are published, is EAGLE's with `mask_states` `[mask tokens, hidden]` and `mask_token_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.block_drafters import is_block_drafter, load_block_drafter
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.dense_layer import read_dense_layer
from anydecode.models.drafter_files import (
    SPECULATORS,
    ReadRows,
    check_target,
    drafter_config,
    head_tokens,
    layer_config,
    own_or_target,
    reduced_head,
)
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.values import bool_value, int_value, list_value, mapping_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import MAX_COUNT, MAX_LAYERS, MAX_TOKENS, refusal
from anydecode.models.linear import Linear
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.network import LayerWeights, ModelWeights, Network
from anydecode.models.spec import FALCON, PARALLELSPEC, BlockSpec, ModelSpec, StateSpec
from anydecode.models.states import StateWeights

#: Class names of configs whose tapped layers are counted by their outputs, not their inputs.
_OUTPUT_TAPS = {"LlamaForCausalLMEagle3", "PEagleDraftModel"}
#: The state of mask tokens of P-EAGLE, and the number of tokens that it drafts by default.
_MASK_STATE, _NUM_DRAFTS = "mask_hidden", 8
#: The keys of the mask token of P-EAGLE: that of speculators and those that vLLM reads too.
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
#: The states of mask tokens of ParallelSpec.
_MASK_STATES = "mask_states"
#: The matrix of the first cell of Falcon's LSTM.
_LSTM = "lstm.weight_ih_l0"
#: The modules of drafters of EAGLE in the layout of speculators, by the names of SafeAILab.
_SPECULATORS_NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "pre_lm_head_layernorm.": "norm.",
}
#: The name of the first layer of EAGLE-3, which converted checkpoints number.
_FIRST_LAYER = "midlayer"


def is_draft_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a drafter that reads its target's states."""
    names = ("fc.weight", "fusion_fc.weight", _LSTM)
    return any(name in checkpoint.tensors for name in names)


def load_draft_head(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> Network:
    """The architecture and the weights of a drafter.

    Args:
        checkpoint: The drafter's files.
        target: Its target, whose embedding and head it uses where it has none of its own.
        dtype: The weight format to convert to; None means as stored.
        read_rows: Reads rows of the target's head, of which a drafter for some tokens only takes
            theirs where it has none of its own.

    Raises:
        CheckpointError: A tensor or config key is missing, invalid or unsupported, or the drafter
            does not fit the target.
    """
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        if is_block_drafter(checkpoint):
            return load_block_drafter(checkpoint, target, dtype, read_rows)
        kind = checkpoint.config.get(SPECULATORS)
        if kind not in (None, "eagle", "eagle3", "peagle"):
            raise refusal(
                SPECULATORS, kind, "eagle, eagle3, peagle, dflash, dflash2, dspark or domino"
            )
        if _LSTM in checkpoint.tensors:
            reader = TensorReader(checkpoint, dtype, "layers.0.self_attn.q_proj")
            return _Falcon(checkpoint, target, reader, read_rows).read()
        checkpoint = _renamed(checkpoint)
        reader = TensorReader(checkpoint, dtype, "fc")
        names = ("d2t", "midlayer.hidden_norm.weight", _MASK_STATE)
        is_third = kind in ("eagle3", "peagle") or any(one in checkpoint.tensors for one in names)
        kinds = _Eagle3 if is_third else _Eagle
        return kinds(checkpoint, target, reader, read_rows).read()


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with SafeAILab's names in place of those of speculators."""
    if "fusion_fc.weight" not in checkpoint.tensors:
        return checkpoint
    readers: dict[str, Reader] = {}
    for name in checkpoint.tensors:
        prefixes = (prefix for prefix in _SPECULATORS_NAMES if name.startswith(prefix))
        prefix = next(prefixes, "")
        new = _SPECULATORS_NAMES.get(prefix, "") + name.removeprefix(prefix)
        readers[new] = partial(checkpoint.tensors.__getitem__, name)
    return replace(checkpoint, tensors=LazyTensors(checkpoint.path, readers))


class _Eagle:
    """Reads a drafter of EAGLE or EAGLE-2: a projection of embedding and state, layers of which the
    first has no norm of its inputs, and the target's head without its norm. ParallelSpec has states
    of mask tokens beside.

    With `layernorms` (speculators) the embedding, the first layer's inputs and the head's are
    normed. Speculators computes no further steps; as in vLLM the state of these is the normed one.
    """

    joins = "projection"

    def __init__(
        self, checkpoint: Checkpoint, target: Network, reader: TensorReader, read_rows: ReadRows
    ) -> None:
        self.checkpoint, self.target, self.reader = checkpoint, target, reader
        self.read_rows = read_rows
        self.config = drafter_config(checkpoint)
        plain = layer_config(self.config, "llama")
        plain.setdefault("num_hidden_layers", 1)
        spec = spec_from_config(plain)
        layer = spec.layers[0]
        if not isinstance(layer.attention, Attention) or layer.num_experts or layer.latent:
            allowed = "a family of dense layers with keys and values"
            raise refusal("model_type", self.config.get("model_type"), allowed)
        self.spec = self._spec(spec)
        self.hidden = spec.hidden_size

    def _spec(self, spec: ModelSpec) -> ModelSpec:
        own, target = spec, self.target.spec
        if own.hidden_size != target.hidden_size:
            raise refusal("hidden_size", own.hidden_size, f"{target.hidden_size}, as the target's")
        has_norms = bool_value(self.config, "layernorms")
        first, block = replace(own.layers[0], has_attention_norm=has_norms), self._mask_block()
        states = StateSpec(
            (),
            target.hidden_size,
            has_embedding_norm=has_norms,
            feeds_normed=has_norms,
            has_mask=block is not None,
        )
        return replace(
            own,
            architecture="Eagle" if block is None else PARALLELSPEC,
            layers=(first, *own.layers[1:]),
            states=states,
            block=block,
            has_final_norm=has_norms,
            logit_scale=target.logit_scale,
            logit_softcap=target.logit_softcap,
        )

    def _mask_block(self) -> BlockSpec | None:
        """What ParallelSpec drafts; None for other drafters."""
        if _MASK_STATES not in self.checkpoint.tensors:
            return None
        shape = np.shape(self.checkpoint.tensors[_MASK_STATES])  # type: ignore[arg-type]
        if len(shape) != 2 or shape[0] >= MAX_COUNT:
            raise CheckpointError(
                f"{self.checkpoint.name}: {_MASK_STATES} has shape {shape}, not [masks, hidden]"
            )
        mask = int_value(self.config, "mask_token_id", low=0, high=MAX_TOKENS)
        return BlockSpec(shape[0] + 1, mask, predicts_next=True)

    def read(self) -> Network:
        """The drafter's network."""
        spec, packed = self.spec, list[Weight]()
        embedding = self._own_or_target("embed_tokens", self.target.weights.embedding, packed)
        head, tokens = self._head(packed)
        layers = [self._layer(index) for index in range(spec.num_layers)]
        norm = self.reader.vector("norm.weight", self.hidden) if spec.has_final_norm else None
        weights = ModelWeights(embedding, layers, norm, head)
        weights.states, weights.head_tokens = self._states(), tokens
        self._check_all_read()
        return Network(spec, weights, packed=tuple(packed))

    def _own_or_target(self, name: str, other: Weight, packed: list[Weight]) -> Weight:
        """A matrix of the drafter, or the target's."""
        shape = (self.spec.vocab_size, self.hidden)
        return own_or_target(self.reader, name, shape, other, packed, self.checkpoint.name)

    def _head(self, packed: list[Weight]) -> tuple[Weight, np.ndarray | None]:
        """The head and its tokens, if they are not all."""
        return self._own_or_target("lm_head", self.target.weights.head, packed), None

    def _states(self) -> StateWeights:
        shape = (self.hidden, 2 * self.hidden)
        weights = StateWeights(projection=self.reader.linear("fc", shape, False))
        if self.spec.has_final_norm:
            name = "embedding_layernorm.weight"
            weights.embedding_norm = self.reader.vector(name, self.hidden)
        if self.spec.block is not None:
            rows = self.spec.block.size - 1
            weights.mask = self.reader.tensor(_MASK_STATES, (rows, self.hidden))
        return weights

    def _layer_name(self, index: int) -> str:
        return f"layers.{index}"

    def _layer(self, index: int) -> LayerWeights:
        name, hidden = self._layer_name(index), self.hidden
        width = hidden if index or self.joins != "attention" else 2 * hidden
        inner = int_value(self.config, "intermediate_size")
        return read_dense_layer(self.reader, name, self.spec.layers[index], hidden, inner, width)

    def _check_all_read(self) -> None:
        """Raise CheckpointError for a layer that the config does not have: it would be left out."""
        count = self.spec.num_layers
        if self.reader.has_module(f"layers.{count}"):
            raise CheckpointError(
                f"num_hidden_layers is {count}, but {self.checkpoint.name} contains more layers"
            )


class _Falcon(_Eagle):
    """Reads a drafter of Falcon: EAGLE's, with the cells of an LSTM in place of the projection. It
    predicts as many positions ahead as its blocks have tokens, whose rows see each other.

    In the published code the LSTM takes the rows for a batch, so that every row starts from zero:
    the matrices of the state before have no effect, as the forget gates have none.
    """

    joins = "cells"

    def _spec(self, spec: ModelSpec) -> ModelSpec:
        if spec.num_layers != 1:  # others would make keys and values of what they attend to
            raise refusal("num_hidden_layers", spec.num_layers, "1, as of published drafters")
        spec, size = super()._spec(spec), int_value(self.config, "k_mask", high=MAX_COUNT)
        states = StateSpec((), self.target.spec.hidden_size, joins=self.joins, stride=size)
        block = BlockSpec(size, None, predicts_next=True)
        return replace(spec, architecture=FALCON, states=states, block=block)

    def _states(self) -> StateWeights:
        return StateWeights(cells=[self._cell(0, 2 * self.hidden), self._cell(1, self.hidden)])

    def _cell(self, number: int, width: int) -> Linear:
        """A cell without its forget gate, which is the second quarter of the rows."""
        size = 4 * self.hidden
        kept = np.delete(np.arange(size), slice(self.hidden, 2 * self.hidden))
        matrix = self.reader.matrix(
            "lstm", (size, width), rows=kept, alias=f"lstm.{number}", part=f"weight_ih_l{number}"
        )
        names = [f"lstm.bias_{part}_l{number}" for part in ("ih", "hh")]
        if not self.reader.has(names[0]):
            return Linear(matrix)
        first, second = (self.reader.vector(name, size)[kept] for name in names)
        return Linear(matrix, first + second)


class _Eagle3(_Eagle):
    """Reads a drafter of EAGLE-3: a projection of states of three layers, a first layer whose
    attention reads embedding and state, and a head of its own, often with fewer tokens. P-EAGLE has
    a state of mask tokens beside."""

    joins = "attention"

    def _spec(self, spec: ModelSpec) -> ModelSpec:
        config, target = self.config, self.target.spec
        size = int_value(config, "target_hidden_size", target.hidden_size)
        if size != target.hidden_size:
            raise refusal("target_hidden_size", size, f"{target.hidden_size}, as the target's")
        taps = self._taps()
        num_norms = len(taps) if bool_value(config, "fc_norm") else 0
        states = StateSpec(
            taps,
            size,
            is_projected=True,
            num_target_norms=1 if bool_value(config, "norm_before_fc") else num_norms,
            joins=self.joins,
            has_norms=True,
            has_normed_residual=bool_value(config, "norm_before_residual", SPECULATORS in config),
            feeds_normed=bool_value(config, "norm_output"),
            has_mask=config.get(SPECULATORS) == "peagle" or self.reader.has(_MASK_STATE),
        )
        head = 0
        if self.reader.has("d2t"):
            head = int_value(config, "draft_vocab_size", high=MAX_TOKENS)
        first = replace(spec.layers[0], has_attention_norm=False)
        layers = (first, *spec.layers[1:])
        name, block = ("PEagle", self._block()) if states.has_mask else ("Eagle3", None)
        return replace(
            spec, architecture=name, layers=layers, states=states, head_size=head, block=block
        )

    def _block(self) -> BlockSpec:
        """What P-EAGLE drafts: as many tokens as the config proposes."""
        count, config = _NUM_DRAFTS, mapping_value(self.config, "speculators_config")
        methods = list_value(config, "proposal_methods", dict)
        if methods:
            count = int_value(methods[0], "speculative_tokens", count, high=MAX_COUNT)
        keys = (key for key in _MASK_KEYS if self.config.get(key) is not None)
        mask = int_value(self.config, next(keys, _MASK_KEYS[0]), low=0, high=MAX_TOKENS)
        return BlockSpec(count, mask, predicts_next=True)

    def _taps(self) -> tuple[int, ...]:
        """The target's hidden states that are read, by number of layers."""
        key, depth = "eagle_aux_hidden_state_layer_ids", self.target.spec.num_layers
        nested = self.config.get("eagle_config")
        holder: Mapping[str, Any] = nested if isinstance(nested, dict) else self.config
        layers = list_value(holder, key, int) or list_value(self.config, key, int)
        if not layers:
            layers = [2, depth // 2, depth - 3]
        elif _OUTPUT_TAPS & set(list_value(self.config, "architectures", str) or ()):
            layers = [layer + 1 for layer in layers]
        if min(layers) < 0 or max(layers) > min(depth, MAX_LAYERS):
            raise refusal(key, layers, f"numbers of the target's {depth} layers")
        return tuple(layers)

    def _head(self, packed: list[Weight]) -> tuple[Weight, np.ndarray | None]:
        size = self.spec.head_size
        if not size:
            return super()._head(packed)
        head, name = self.target.weights.head, self.checkpoint.name
        tokens = self._tokens(size)
        shared = reduced_head(self.reader, tokens, self.hidden, head, self.read_rows, name)
        return shared, tokens

    def _tokens(self, size: int) -> np.ndarray:
        """The tokens of the head's rows."""
        return head_tokens(self.checkpoint, size, self.spec.vocab_size)

    def _states(self) -> StateWeights:
        states, hidden, read = self.spec.states, self.hidden, self.reader.vector
        assert states is not None
        width = states.num_taps * states.target_size
        first = self._layer_name(0)
        weights = StateWeights(
            embedding_norm=read(f"{first}.input_layernorm.weight", hidden),
            state_norm=read(f"{first}.hidden_norm.weight", hidden),
            target=self.reader.linear("fc", (hidden, width), False),
        )
        if states.has_mask:
            weights.mask = self.reader.tensor(_MASK_STATE, (1, 1, width))[0]
        if states.num_target_norms == 1:
            weights.target_norms = [read("input_norm.weight", width)]
        elif states.num_target_norms:
            names = (f"fc_norm.{tap}.weight" for tap in range(states.num_taps))
            weights.target_norms = [read(name, states.target_size) for name in names]
        return weights

    def _layer_name(self, index: int) -> str:
        is_first = index == 0 and self.reader.has_module(_FIRST_LAYER)
        return _FIRST_LAYER if is_first else f"layers.{index}"

"""Opens drafters that predict a block of tokens in one pass, by their files: DFlash (Chen et al.,
arXiv:2602.06036) and DFlash2 (by z-lab), DSpark (arXiv:2607.05147) and Domino (arXiv:2605.29707).

Layouts: those of z-lab/dflash, DeepSpec, SpecForge and speculators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.block_head_files import read_block_heads
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafter_files import (
    SPECULATORS,
    ReadRows,
    drafter_config,
    head_tokens,
    layer_config,
    own_or_target,
    reduced_head,
)
from anydecode.models.families.build import read_layer
from anydecode.models.families.config import spec_from_config, text_config
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import (
    bool_value,
    int_value,
    list_value,
    mapping_value,
    optional_number,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, MAX_TOKENS, refusal
from anydecode.models.network import BlockConvolution, ModelWeights, Network
from anydecode.models.spec import BlockSpec, ModelSpec, StateSpec
from anydecode.models.states import StateWeights

#: Keys of the target's layers that are read: counted by their inputs, and by their outputs.
_TAP_KEYS = ("aux_hidden_state_layer_ids", "target_layer_ids")
#: Keys of drafters of this kind that work otherwise, with the only values that are supported.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "use_swa": (None, False),
    "projector_type": (None, "dflash", "dspark", "domino"),
}
#: Keys of DFlash2 in `dflash_config`, and the names of what they set.
_FACTORS = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "logit_softcap",
}
#: Kinds of block drafters beside DFlash.
_KINDS = ("DFlash2", "DSpark", "Domino")


def is_block_drafter(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a drafter that predicts blocks."""
    config = checkpoint.config
    return (
        "hidden_norm.weight" in checkpoint.tensors
        or "dflash_config" in config
        or config.get(SPECULATORS) in ("dflash", "dflash2", "dspark", "domino")
    )


def load_block_drafter(
    checkpoint: Checkpoint, target: Network, dtype: str | None, read_rows: ReadRows
) -> Network:
    """The architecture and the weights of a block drafter. Arguments and errors as for
    `load_draft_head`."""
    return _BlockDrafter(checkpoint, target, dtype, read_rows).read()


@dataclass(eq=False)
class _ReadTensors(Mapping[str, Any]):
    """Tensors, with the names of those that were read."""

    tensors: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class _BlockDrafter:
    """Reads a drafter whose layers attend to a context of the target's states, and its heads."""

    def __init__(
        self, checkpoint: Checkpoint, target: Network, dtype: str | None, read_rows: ReadRows
    ) -> None:
        self.read_rows = read_rows
        self.tensors = _ReadTensors(checkpoint.tensors)
        self.checkpoint = replace(checkpoint, tensors=self.tensors)
        self.target = target
        self.reader = TensorReader(self.checkpoint, dtype, "fc")
        config = drafter_config(checkpoint)
        self.own_options = mapping_value(config, "dflash_config")
        self.options = {**config, **self.own_options}
        for key, allowed in _UNSUPPORTED.items():
            if self.options.get(key) not in allowed:
                raise refusal(key, self.options[key], f"one of {allowed}, as of DFlash and DSpark")
        kinds = ("dflash", *(kind.lower() for kind in _KINDS))
        if config.get(SPECULATORS) not in (None, *kinds):
            raise refusal(SPECULATORS, config[SPECULATORS], " or ".join(kinds))
        layers = {**config, "is_causal": None}  # of the block, see `_block`
        self.config = text_config(layer_config(layers, "qwen3"))
        self.spec = self._spec(spec_from_config(self.config))

    @property
    def _kind(self) -> str:
        keys = ("architectures", "projector_type", SPECULATORS)
        names = f"{[self.options.get(key) for key in keys]}".lower()
        return next((kind for kind in _KINDS if kind.lower() in names), "DFlash")

    def _spec(self, plain: ModelSpec) -> ModelSpec:
        target, reader = self.target.spec, self.reader
        for layer in plain.layers:
            is_plain = isinstance(layer.attention, Attention) and layer.cache_layer is None
            if not is_plain or layer.recurrence or layer.latent or layer.num_experts:
                allowed = "a family of dense layers with keys and values of their own"
                raise refusal("model_type", self.config.get("model_type"), allowed)
        if plain.vocab_size != target.vocab_size:
            allowed = f"{target.vocab_size}, as the target's"
            raise refusal("vocab_size", plain.vocab_size, allowed)
        size = int_value(self.options, "target_hidden_size", target.hidden_size)
        if size != target.hidden_size:
            raise refusal("target_hidden_size", size, f"{target.hidden_size}, as the target's")
        head = 0
        if reader.has("d2t"):
            head = int_value(self.options, "draft_vocab_size", high=MAX_TOKENS)
        spec = replace(
            plain,
            architecture=self._kind,
            states=StateSpec(self._taps(), size, is_projected=True, joins="context"),
            block=self._block(plain),
            head_size=head,
        )
        if not reader.has("embed_tokens.weight"):
            spec = replace(spec, embedding_scale=target.embedding_scale)
        if not reader.has("lm_head.weight"):
            logits = {"logit_scale": target.logit_scale, "logit_softcap": target.logit_softcap}
            spec = replace(spec, **logits)  # type: ignore[arg-type]
        given = {
            name: optional_number(self.own_options, key)
            for key, name in _FACTORS.items()
            if self.own_options.get(key)
        }
        return replace(spec, **given)  # type: ignore[arg-type]

    def _block(self, plain: ModelSpec) -> BlockSpec:
        options, count = self.options, plain.num_layers
        key = "is_causal" if options.get("causal") is None else "causal"
        is_causal = bool_value(options, "causal_head") or bool_value(options, key)
        causal = list(range(count)) if is_causal else []
        if options.get(key) is None and not bool_value(options, "sliding_window_non_causal"):
            attention = [layer.attention for layer in plain.layers]
            windows = [shape is not None and shape.window is not None for shape in attention]
            causal = sorted({*causal, *np.flatnonzero(windows).tolist()})
        shifted = bool_value(options, "shift_label")
        return BlockSpec(
            int_value(options, "block_size", high=MAX_COUNT),
            int_value(options, "mask_token_id", low=0, high=MAX_TOKENS),
            bool_value(options, "sample_from_anchor", shifted or self._kind == "DSpark"),
            tuple(causal),
        )

    def _taps(self) -> tuple[int, ...]:
        """The target's hidden states that are read, by number of layers: `target_layer_ids` count
        outputs of layers (-1: the embeddings), `aux_hidden_state_layer_ids` their inputs."""
        depth, inputs, outputs = self.target.spec.num_layers, *_TAP_KEYS
        if self.options.get(inputs) is not None:
            key, taps = inputs, list_value(self.options, inputs, int) or []
        else:
            key, given = outputs, list_value(self.options, outputs, int)
            if given is None:
                given = _default_taps(depth, int_value(self.config, "num_hidden_layers"))
            taps = [layer + 1 for layer in given]
        if not taps or min(taps) < 0 or max(taps) >= depth:
            # That after the last layer may be meant before or after the final norm.
            allowed = f"layers of the target's {depth}, without the output of the last"
            raise refusal(key, self.options.get(key), allowed)
        return tuple(taps)

    def read(self) -> Network:
        """The drafter's network."""
        spec, reader, packed = self.spec, self.reader, list[Weight]()
        offset = FAMILIES[self.config["model_type"]].norm_offset
        outer, name = (spec.vocab_size, spec.hidden_size), self.checkpoint.name
        target, tokens = self.target.weights, None
        embedding = own_or_target(reader, "embed_tokens", outer, target.embedding, packed, name)
        if spec.head_size:
            tokens = head_tokens(self.checkpoint, spec.head_size, spec.vocab_size)
            head = reduced_head(reader, tokens, spec.hidden_size, target.head, self.read_rows, name)
        else:
            head = own_or_target(reader, "lm_head", outer, target.head, packed, name)
        norm = reader.vector("norm.weight", spec.hidden_size, offset)
        layers = [read_layer(reader, spec, self.config, index) for index in range(spec.num_layers)]
        if taps := int_value(self.options, "conv_kernel_size", 0, low=0, high=MAX_COUNT):
            for index, layer in enumerate(layers):
                layer.attention_convolution = self._convolution(f"layers.{index}.attention", taps)
                layer.mlp_convolution = self._convolution(f"layers.{index}.mlp", taps)
        weights = ModelWeights(embedding, layers, norm, head)
        states = spec.states
        assert states is not None
        width = states.num_taps * states.target_size
        weights.states = StateWeights(
            target=reader.linear("fc", (spec.hidden_size, width), False),
            state_norm=reader.vector("hidden_norm.weight", spec.hidden_size, offset),
        )
        weights.head_tokens = tokens
        weights.block_heads = read_block_heads(reader, self.options, spec, tokens)
        self._check_all_read()
        return Network(spec, weights, packed=tuple(packed))

    def _convolution(self, name: str, taps: int) -> BlockConvolution:
        """The convolutions of a sublayer (DFlash2)."""
        size, block = self.spec.hidden_size, self.spec.block
        group = int_value(self.options, "conv_group_size", high=size)
        if size % group:
            raise refusal("conv_group_size", group, f"a divisor of the hidden size {size}")
        assert block is not None and block.mask_token is not None, "of this kind of drafters"
        shape = (2 * taps * (size // group), size)
        return BlockConvolution(
            self.reader.linear(f"{name}_conv.kernel_projection", shape, False),
            self.reader.tensor(f"{name}_conv.base_kernel", (2, taps, size)),
            block.mask_token,
        )

    def _check_all_read(self) -> None:
        """Raise CheckpointError for a tensor that was not used: the drafter would be another."""
        unused = sorted(set(self.tensors) - self.tensors.read - {"t2d"})
        if unused:
            raise CheckpointError(
                f"{self.checkpoint.name}: {unused[0]} is not a part of a"
                f" {self.spec.architecture} drafter with this config"
            )


def _default_taps(depth: int, num_layers: int) -> list[int]:
    """The layers of the target whose outputs are read where the config names none."""
    if num_layers == 1:
        return [depth // 2]
    span = depth - 4
    return [round(1 + index * span / (num_layers - 1)) for index in range(num_layers)]

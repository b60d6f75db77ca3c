"""Opens drafters of Chimera, by their files.

Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference
by Fusing all Tokens", arXiv:2402.15758.

A trigram encoder makes a state of the last three tokens. A layer, the full context encoder, lets it
attend to the target's last states after the final norm at all positions before, and to itself; its
output stands for the state that the target has not computed. Where further tokens are drafted,
these outputs take the place of the target's states. The resolver of each drafted token makes what
the target's head reads, of the target's last state and the output. Modules are named as in the code
of its authors (kafkayu/Chimera), but for `resolvers`, whose heads have a matrix of all tokens each
there; `token_map` and `lm_head` are optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize, dequantize_rows
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.dense_layer import read_dense_layer
from anydecode.models.drafter_files import (
    ReadRows,
    check_target,
    head_rows,
    layer_config,
    mapped_tokens,
)
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.values import int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import refusal
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights, ModelWeights, Network
from anydecode.models.spec import CHIMERA, MAX_STEPS, LayerSpec, StateSpec
from anydecode.models.states import StateWeights
from anydecode.models.transformer import Executor, Transformer

_BLOCK, _TRIGRAM, _LAYER = "trimlp.0.linear", "trimlp.1", "fast_layer1.0"


@dataclass(eq=False)
class ChimeraNetwork(Network):
    """The full context encoder.

    Attributes:
        block: The residual block x + silu(block(x)) of three embeddings side by side.
        trigram: From the block's output to the trigram's state.
        resolvers: Of each drafted token: from the target's last state and the encoder's output side
            by side to what the head reads.
    """

    block: Linear | None = None
    trigram: Linear | None = None
    resolvers: list[Linear] = field(default_factory=list)

    def matrices(self) -> Iterator[Weight]:
        yield from super().matrices()
        assert self.block is not None and self.trigram is not None
        for linear in (self.block, self.trigram, *self.resolvers):
            yield linear.weight


class ChimeraTransformer(Transformer):
    """A `ChimeraNetwork` as a model. Its rows have no tokens: they read the states of trigrams, or
    outputs of the encoder. Arguments as for `Transformer`."""

    network: ChimeraNetwork

    def __init__(
        self, network: ChimeraNetwork, *, name: str, executor: Callable[[Network], Executor]
    ) -> None:
        super().__init__(network, name=name, executor=executor)
        # Embeddings and logits are computed while passes of other requests run.
        spec = replace(network.spec, layers=(LayerSpec(None, None, mlp="none"),), states=None)
        weights = replace(network.weights, layers=[LayerWeights()], states=None)
        packed = (weights.embedding, weights.head)
        self._ends: Any = executor(Network(spec, weights, packed=packed))

    def trigram_states(self, tokens: np.ndarray) -> np.ndarray:
        """The states of trigrams `[n, 3]`, float32 `[n, hidden_size]`."""
        network = self.network
        assert network.block is not None and network.trigram is not None
        x = to_host(self._ends.embed(tokens.reshape(-1))).reshape(len(tokens), -1)
        inner = self._product(x, network.block)
        return self._product(x + inner / (1 + np.exp(-inner)), network.trigram)

    def resolve(self, state: np.ndarray, outputs: np.ndarray, step: int) -> np.ndarray:
        """The logits of drafted tokens number `step`, float32 `[n, vocab_size]`, of which those
        that cannot be drafted are -inf.

        Args:
            state: The target's last state, float32 `[hidden_size]`.
            outputs: Of the encoder, float32 `[n, hidden_size]`.
            step: Number of tokens that are drafted before.
        """
        pairs = np.concatenate([np.broadcast_to(state, outputs.shape), outputs], -1)
        logits = to_host(self._ends.head(self._product(pairs, self.network.resolvers[step])))
        if self.head_tokens is None:
            return logits
        rows = np.full((len(logits), self.spec.vocab_size), -np.inf, np.float32)
        rows[:, self.head_tokens] = logits
        return rows

    def _product(self, x: np.ndarray, linear: Linear) -> np.ndarray:
        product = getattr(self._ends, "linear", None)
        if product is not None:
            result: np.ndarray = product(x, linear.weight, linear.bias)
            return result
        y: np.ndarray = x @ dequantize(linear.weight).T
        return y if linear.bias is None else y + linear.bias


def is_chimera(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a drafter of Chimera."""
    return f"{_TRIGRAM}.weight" in checkpoint.tensors


def load_chimera(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> ChimeraNetwork:
    """The drafter of a checkpoint. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        reader = TensorReader(checkpoint, dtype, _TRIGRAM)
        return _read(checkpoint, target, reader, read_rows)


def _read(
    checkpoint: Checkpoint, target: Network, reader: TensorReader, read_rows: ReadRows
) -> ChimeraNetwork:
    config, width = checkpoint.config, target.spec.hidden_size
    heads = int_value(config, "chimera_num_heads", high=MAX_STEPS)
    plain = {**layer_config(dict(config), "llama"), "num_hidden_layers": 1}
    spec = spec_from_config(plain)
    (layer,) = spec.layers
    if not isinstance(layer.attention, Attention) or layer.num_experts or layer.latent:
        raise refusal("model_type", config.get("model_type"), "a dense family")
    if spec.hidden_size != width:
        raise refusal("hidden_size", spec.hidden_size, f"{width}, as the target's")
    if reader.has_module(f"resolvers.{heads}"):
        raise CheckpointError(
            f"chimera_num_heads is {heads}, but {checkpoint.name} contains more resolvers"
        )
    tokens, packed = mapped_tokens(checkpoint, spec.vocab_size), [target.weights.embedding]
    size = spec.vocab_size if tokens is None else len(tokens)
    has_own_head = reader.has("lm_head.weight")
    if has_own_head:
        head = reader.matrix("lm_head", (size, width), is_outer=True)
    else:
        head = head_rows(reader, tokens, target, read_rows, packed)
    inner = int_value(config, "intermediate_size")
    own_layer = read_dense_layer(reader, _LAYER, layer, width, inner, width)
    weights = ModelWeights(packed[0], [own_layer], None, head, head_tokens=tokens)
    weights.states = StateWeights(state_norm=own_layer.attention_norm)
    own_spec = replace(
        spec,
        architecture=CHIMERA,
        embedding_scale=target.spec.embedding_scale,
        states=StateSpec((), width, joins="context", num_heads=heads),
        has_final_norm=False,
        head_size=0 if tokens is None else size,
        logit_scale=1.0 if has_own_head else target.spec.logit_scale,
        logit_softcap=None if has_own_head else target.spec.logit_softcap,
    )
    return ChimeraNetwork(
        own_spec,
        weights,
        packed=tuple(packed),
        block=reader.linear(_BLOCK, (3 * width, 3 * width), True),
        trigram=reader.linear(_TRIGRAM, (width, 3 * width), False),
        resolvers=[
            reader.linear(f"resolvers.{number}", (width, 2 * width), False)
            for number in range(heads)
        ],
    )

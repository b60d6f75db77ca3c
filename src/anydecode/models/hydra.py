"""Opens Hydra heads, by their files.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv:2402.05109.

Head i predicts a token from the target's last state after its final norm and the embeddings of the
i tokens behind it. Hydra++ first runs the state through a layer with keys and values of its own.
Layout: that of zankner/Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Attention, Backend, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.dense_layer import read_dense_layer
from anydecode.models.drafter_files import ReadRows, check_target, head_rows, mapped_tokens
from anydecode.models.families.values import bool_value, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import refusal
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights, ModelWeights, Network
from anydecode.models.spec import MAX_STEPS, LayerSpec, ModelSpec, StateSpec
from anydecode.models.step_heads import StepNetwork

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(\d+)\.weight")
_PREFIX = "prefix_embeding_layer"  # as it is spelt in the files


@dataclass(eq=False)
class HydraHead:
    """residual(x) + silu(first(x)) of state and embeddings side by side, then blocks x + silu(W x +
    b), then the products of `output`."""

    first: Linear
    residual: Linear
    blocks: list[Linear]
    output: Linear


@dataclass(eq=False)
class HydraNetwork(StepNetwork):
    """Hydra heads. A state has the target's state, then a place for the embedding of the row's
    token at each step. `prefix` is the layer of Hydra++ with its norm."""

    heads: list[HydraHead] = field(default_factory=list)
    prefix: Network | None = None

    @property
    def size(self) -> int:
        """The target's hidden size."""
        return self.width // (self.num_steps + 1)

    def step_layer(self, backend: Backend, x: Any, step: int, index: int) -> Any:
        size = self.size
        before = backend.columns(x, 0, (step + 1) * size)
        if step == 0 and self.prefix is not None:
            before = self.prefix.layer(backend, before, 0)
            before = self.prefix.final_norm(backend, before)
        scale = self.spec.embedding_scale
        y = backend.join(before, backend.token_rows(self.weights.embedding, scale))
        first = (step + 2) * size
        if first == self.width:
            return y
        return backend.join(y, backend.columns(x, first, self.width - first))

    def step_head(self, backend: Backend, x: Any, step: int) -> Any:
        head = self.heads[step]
        x = backend.columns(x, 0, (step + 2) * self.size)
        inner = backend.activate(head.first.apply(backend, x), "silu")
        x = backend.add(head.residual.apply(backend, x), inner)
        for block in head.blocks:
            x = backend.add(x, backend.activate(block.apply(backend, x), "silu"))
        return self.scaled_logits(backend, head.output.apply(backend, x))

    def step_matrices(self) -> Iterator[Weight]:
        for head in self.heads:
            for linear in (head.first, head.residual, *head.blocks, head.output):
                yield linear.weight
        if self.prefix is not None:
            yield from self.prefix.weights.layers[0].matrices


def is_hydra(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has Hydra heads."""
    return any(_BLOCK.fullmatch(name) for name in checkpoint.tensors)


def load_hydra(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> HydraNetwork:
    """The heads of a checkpoint. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        return _Hydra(checkpoint, target, dtype, read_rows).read()


class _Hydra:
    def __init__(
        self, checkpoint: Checkpoint, target: Network, dtype: str | None, read_rows: ReadRows
    ) -> None:
        self.checkpoint, self.target, self.read_rows = checkpoint, target, read_rows
        config = checkpoint.config
        if not bool_value(config, "grounded_heads", True):
            raise refusal("grounded_heads", False, "true: heads that read the drafted tokens")
        if int_value(config, "hidden_state_offset", 0, low=0):
            raise refusal("hidden_state_offset", config["hidden_state_offset"], "0")
        self.blocks, self.outputs = self._numbers(_BLOCK), self._numbers(_OUTPUT)
        self._check_numbers()
        self.reader = TensorReader(checkpoint, dtype, f"hydra_mlp.0.{self.blocks[0][0]}.linear")
        self.hidden = target.spec.hidden_size

    def read(self) -> HydraNetwork:
        embedding = self.target.weights.embedding
        packed, shared = [embedding], None
        tokens = mapped_tokens(self.checkpoint, self.target.spec.vocab_size)
        if not self.outputs:
            shared = Linear(head_rows(self.reader, tokens, self.target, self.read_rows, packed))
        size = self.target.spec.vocab_size if tokens is None else len(tokens)
        heads = [self._head(head, size, shared) for head in range(len(self.blocks))]
        prefix = self._prefix() if self.reader.has_module(_PREFIX) else None
        layers = [LayerWeights()] if prefix is None else prefix.weights.layers
        head = heads[0].output.weight
        weights = ModelWeights(embedding, layers, None, head, head_tokens=tokens)
        spec = self._spec(len(heads), 0 if tokens is None else size, prefix)
        return HydraNetwork(spec, weights, packed=tuple(packed), heads=heads, prefix=prefix)

    def _spec(self, num_heads: int, head_size: int, prefix: Network | None) -> ModelSpec:
        target = self.target.spec
        layer = LayerSpec(None, None, mlp="none") if prefix is None else prefix.spec.layers[0]
        return ModelSpec(
            architecture="Hydra" if prefix is None else "Hydra++",
            vocab_size=target.vocab_size,
            hidden_size=(num_heads + 1) * self.hidden + 1,
            max_positions=target.max_positions,
            norm_eps=target.norm_eps,
            layers=(layer,),
            embedding_scale=target.embedding_scale,
            states=StateSpec((), self.hidden, num_heads=num_heads),
            has_final_norm=False,
            head_size=head_size,
            logit_scale=1.0 if self.outputs else target.logit_scale,
            logit_softcap=None if self.outputs else target.logit_softcap,
        )

    def _numbers(self, pattern: re.Pattern[str]) -> dict[int, list[int]]:
        """The numbers of a head's modules, by head: files saved with dropout skip some."""
        numbers: dict[int, list[int]] = {}
        for name in self.checkpoint.tensors:
            match = pattern.fullmatch(name)
            if match:
                numbers.setdefault(int(match[1]), []).append(int(match[2]))
        return {head: sorted(found) for head, found in sorted(numbers.items())}

    def _check_numbers(self) -> None:
        heads = list(range(len(self.blocks)))
        is_valid = list(self.blocks) == heads and len(heads) <= MAX_STEPS
        is_valid &= not self.outputs or list(self.outputs) == heads
        if not is_valid or any(len(found) > 1 for found in self.outputs.values()):
            raise CheckpointError(
                f"{self.checkpoint.name}: has blocks of the Hydra heads {list(self.blocks)[:40]}"
                f" and outputs of {list(self.outputs)[:40]}; allowed are 1 to {MAX_STEPS} heads"
            )

    def _head(self, head: int, size: int, shared: Linear | None) -> HydraHead:
        first, *others = (f"hydra_mlp.{head}.{number}" for number in self.blocks[head])
        wide, square = (self.hidden, (head + 2) * self.hidden), (self.hidden, self.hidden)
        read = self.reader.linear
        return HydraHead(
            read(f"{first}.linear", wide, False),
            read(f"{first}.res_connection", wide, False),
            [read(f"{other}.linear", square, False) for other in others],
            shared or self._output(head, size),
        )

    def _output(self, head: int, size: int) -> Linear:
        name = f"hydra_lm_head.{head}.{self.outputs[head][0]}"
        bias = self.reader.vector(f"{name}.bias", size) if self.reader.has(f"{name}.bias") else None
        return Linear(self.reader.matrix(name, (size, self.hidden), is_outer=True), bias)

    def _prefix(self) -> Network:
        """The layer of Hydra++: one of the target's kind, which has its keys and values."""
        target, name = self.target.spec, f"{_PREFIX}.layers.0"
        layer = target.layers[0]
        is_dense = not (layer.num_experts or layer.latent or layer.attention_gate)
        is_plain = layer.mlp == "gated" and layer.norms == "pre" and target.norm == "rms"
        if not (isinstance(layer.attention, Attention) and is_dense and is_plain):
            allowed = "a target of the kind of Llama"
            raise refusal("hydra_head_arch", self.checkpoint.config.get("hydra_head_arch"), allowed)
        gate = self.checkpoint.tensors[f"{name}.mlp.gate_proj.weight"]
        inner = gate.out_features if isinstance(gate, Weight) else len(gate)
        weights = ModelWeights(
            self.target.weights.embedding,
            [read_dense_layer(self.reader, name, layer, self.hidden, inner, self.hidden)],
            self.reader.vector(f"{_PREFIX}.norm.weight", self.hidden),
            self.target.weights.head,
        )
        spec = replace(target, layers=(layer,))
        return Network(spec, weights, packed=(weights.embedding, weights.head))

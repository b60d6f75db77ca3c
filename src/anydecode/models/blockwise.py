"""Opens the proposal heads of blockwise parallel decoding, by their files.

Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models", arXiv:1811.03115.

One ReLU layer with a hidden part that all heads share adds to the target's last state after its
final norm; the target's own head reads the sums. Head i predicts the token i + 1 positions behind
the state's; the first head of the paper is the target. Layout: `blockwise.hidden` `[hidden, width]`
and `blockwise.output` `[heads * width, hidden]`, with biases, as the layer of
tensorflow/tensor2tensor; optionally `token_map` and `lm_head`. The config has the target's
`vocab_size`, which no tensor tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Backend, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafter_files import ReadRows, check_target, head_rows, mapped_tokens
from anydecode.models.families.values import int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.limits import MAX_SIZE, MAX_TOKENS
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights, ModelWeights, Network
from anydecode.models.spec import MAX_STEPS, LayerSpec, ModelSpec, StateSpec
from anydecode.models.step_heads import StepNetwork

_HIDDEN, _OUTPUT = "blockwise.hidden", "blockwise.output"


@dataclass(eq=False)
class BlockwiseNetwork(StepNetwork):
    """Proposal heads: x + outputs[step](relu(hidden(x))), then the same head for all."""

    hidden: Linear | None = None
    outputs: list[Linear] = field(default_factory=list)

    @property
    def shared_head(self) -> bool:
        return True

    def step_layer(self, backend: Backend, x: Any, step: int, index: int) -> Any:
        assert self.hidden is not None
        inner = backend.activate(self.hidden.apply(backend, x), "relu")
        return backend.add(x, self.outputs[step].apply(backend, inner))

    def step_head(self, backend: Backend, x: Any, step: int) -> Any:
        return self.scaled_logits(backend, backend.linear(x, self.weights.head))

    def step_matrices(self) -> Iterator[Weight]:
        assert self.hidden is not None
        yield self.hidden.weight
        yield from (output.weight for output in self.outputs)
        yield self.weights.head


def is_blockwise(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has proposal heads of blockwise parallel decoding."""
    return f"{_HIDDEN}.weight" in checkpoint.tensors


def load_blockwise(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> BlockwiseNetwork:
    """The heads of a checkpoint. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        reader, width = TensorReader(checkpoint, dtype, _HIDDEN), target.spec.hidden_size
        heads = int_value(checkpoint.config, "blockwise_num_heads", high=MAX_STEPS)
        inner = int_value(checkpoint.config, "blockwise_hidden_size", high=MAX_SIZE)
        int_value(checkpoint.config, "vocab_size", high=MAX_TOKENS)  # for `check_target`
        tokens = mapped_tokens(checkpoint, target.spec.vocab_size)
        packed = [target.weights.embedding]
        size = target.spec.vocab_size if tokens is None else len(tokens)
        has_own_head = reader.has("lm_head.weight")
        if has_own_head:
            head = reader.matrix("lm_head", (size, width), is_outer=True)
        else:
            head = head_rows(reader, tokens, target, read_rows, packed)
        outputs = [_output(reader, number, heads, width, inner) for number in range(heads)]
        spec = _spec(target.spec, heads, tokens, has_own_head)
        weights = ModelWeights(packed[0], [LayerWeights()], None, head, head_tokens=tokens)
        return BlockwiseNetwork(
            spec,
            weights,
            packed=tuple(packed),
            hidden=reader.linear(_HIDDEN, (inner, width), True),
            outputs=outputs,
        )


def _output(reader: TensorReader, number: int, heads: int, width: int, inner: int) -> Linear:
    rows = slice(number * width, (number + 1) * width)
    return reader.linear(
        _OUTPUT, (heads * width, inner), True, rows=rows, alias=f"{_OUTPUT}.{number}"
    )


def _spec(
    target: ModelSpec, heads: int, tokens: np.ndarray | None, has_own_head: bool
) -> ModelSpec:
    return ModelSpec(
        architecture="Blockwise",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size + 1,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        layers=(LayerSpec(None, None, mlp="none"),),
        states=StateSpec((), target.hidden_size, num_heads=heads, reads_tokens=False),
        has_final_norm=False,
        head_size=0 if tokens is None else len(tokens),
        logit_scale=1.0 if has_own_head else target.logit_scale,
        logit_softcap=None if has_own_head else target.logit_softcap,
    )

"""Opens Medusa heads, by their files.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv:2401.10774.

Head i predicts, from the target's last state after its final norm, the token i + 1 positions behind
it. Layouts: those of FasterDecoding/Medusa (heads alone or in the target's folder) and of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.interface import Backend, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafter_files import ReadRows, check_target, head_rows, mapped_tokens
from anydecode.models.families.values import bool_value, optional_number
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights, ModelWeights, Network
from anydecode.models.spec import MAX_STEPS, LayerSpec, ModelSpec, StateSpec
from anydecode.models.step_heads import StepNetwork

#: The names of a head's first module by layout: heads alone, heads in the target's folder, vLLM.
_BLOCKS = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.weight"), "{head}.{block}.linear"),
    (re.compile(r"medusa_head\.(\d+)\.(\d+)\.linear\.weight"), "medusa_head.{head}.{block}.linear"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"), "blocks.{head}.layers.{block}"),
)


@dataclass(eq=False)
class MedusaHead:
    """Blocks x + silu(W x + b) and a matrix `[num_logits, hidden_size]`."""

    blocks: list[Linear]
    output: Weight


@dataclass(eq=False)
class MedusaNetwork(StepNetwork):
    """Medusa heads; `heads[step]` reads the target's state alone."""

    heads: list[MedusaHead] = field(default_factory=list)

    @property
    def shared_head(self) -> bool:
        return all(head.output is self.heads[0].output for head in self.heads)

    def step_layer(self, backend: Backend, x: Any, step: int, index: int) -> Any:
        for block in self.heads[step].blocks:
            x = backend.add(x, backend.activate(block.apply(backend, x), "silu"))
        return x

    def step_head(self, backend: Backend, x: Any, step: int) -> Any:
        return self.scaled_logits(backend, backend.linear(x, self.heads[step].output))

    def step_matrices(self) -> Iterator[Weight]:
        for head in self.heads:
            yield from (block.weight for block in head.blocks)
            yield head.output


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has Medusa heads."""
    return _layout(checkpoint.tensors) is not None


def load_medusa(
    checkpoint: Checkpoint,
    target: Network,
    dtype: str | None = None,
    read_rows: ReadRows = dequantize_rows,
) -> MedusaNetwork:
    """The heads of a checkpoint. Arguments and errors as for `load_draft_head`."""
    with untrusted(checkpoint.path):
        check_target(checkpoint, target)
        return _Medusa(checkpoint, target, dtype, read_rows).read()


def _layout(tensors: Mapping[str, Any]) -> tuple[re.Pattern[str], str] | None:
    return next((one for one in _BLOCKS if any(one[0].fullmatch(x) for x in tensors)), None)


class _Medusa:
    def __init__(
        self, checkpoint: Checkpoint, target: Network, dtype: str | None, read_rows: ReadRows
    ) -> None:
        layout = _layout(checkpoint.tensors)
        assert layout is not None, "checked by `is_medusa`"
        self.pattern, self.name = layout
        self.checkpoint, self.target, self.read_rows = checkpoint, target, read_rows
        self.reader = TensorReader(checkpoint, dtype, re.sub(r"{\w+}", "0", self.name))
        self.hidden = target.spec.hidden_size
        self.packed: list[Weight] = [target.weights.embedding]

    def read(self) -> MedusaNetwork:
        counts = self._counts()
        vocab = self.target.spec.vocab_size
        tokens = mapped_tokens(self.checkpoint, vocab)
        size = vocab if tokens is None else len(tokens)
        heads, is_targets = self._outputs(len(counts), tokens, size)
        parts = [
            MedusaHead([self._block(head, block) for block in range(count)], output)
            for head, (count, output) in enumerate(zip(counts, heads, strict=True))
        ]
        spec = self._spec(len(parts), 0 if tokens is None else size, not is_targets)
        embedding = self.target.weights.embedding
        weights = ModelWeights(embedding, [LayerWeights()], None, heads[0], head_tokens=tokens)
        return MedusaNetwork(spec, weights, packed=tuple(self.packed), heads=parts)

    def _spec(self, num_heads: int, head_size: int, has_own_head: bool) -> ModelSpec:
        target = self.target.spec
        scale = optional_number(self.checkpoint.config, "logit_scale") or 1.0
        return ModelSpec(
            architecture="Medusa",
            vocab_size=target.vocab_size,
            hidden_size=self.hidden + 1,
            max_positions=target.max_positions,
            norm_eps=target.norm_eps,
            layers=(LayerSpec(None, None, mlp="none"),),
            states=StateSpec((), self.hidden, num_heads=num_heads, reads_tokens=False),
            has_final_norm=False,
            head_size=head_size,
            logit_scale=scale if has_own_head else target.logit_scale,
            logit_softcap=None if has_own_head else target.logit_softcap,
        )

    def _counts(self) -> list[int]:
        """The number of blocks of each head: configs may name another number of heads."""
        blocks: dict[int, set[int]] = {}
        for name in self.checkpoint.tensors:
            match = self.pattern.fullmatch(name)
            if match:
                blocks.setdefault(int(match[1]), set()).add(int(match[2]))
        counts = [len(blocks.get(head, ())) for head in range(len(blocks))]
        is_complete = all(
            blocks[head] == set(range(count)) for head, count in enumerate(counts) if count
        )
        if len(blocks) > MAX_STEPS or not all(counts) or not is_complete:
            raise CheckpointError(
                f"{self.checkpoint.name}: the numbers of Medusa heads and blocks have gaps, or"
                f" there are more than {MAX_STEPS} heads"
            )
        return counts

    def _block(self, head: int, block: int) -> Linear:
        name = self.name.format(head=head, block=block)
        return self.reader.linear(name, (self.hidden, self.hidden), False)

    def _outputs(
        self, num_heads: int, tokens: np.ndarray | None, size: int
    ) -> tuple[list[Weight], bool]:
        """The last matrix of each head, and whether it is the target's head, as without one in the
        files."""
        names = [self._output_name(head) for head in range(num_heads)]
        found = [name for name in names if name is not None]
        if not found:
            head = head_rows(self.reader, tokens, self.target, self.read_rows, self.packed)
            return [head] * num_heads, True
        if len(found) < num_heads:
            missing = names.index(None)
            raise CheckpointError(f"{self.checkpoint.name}: Medusa head {missing} has no output")
        read = {
            name: self.reader.matrix(name, (size, self.hidden), is_outer=True) for name in found
        }
        return [read[name] for name in found], False

    def _output_name(self, head: int) -> str | None:
        """The module of a head's last matrix."""
        if self.name.startswith("blocks"):
            is_one = bool_value(self.checkpoint.config, "original_lm_head")
            options = [f"lm_heads.{0 if is_one else head}", *(["lm_head"] if is_one else ())]
        else:
            start = f"{self.name.partition('{head}')[0]}{head}."
            names = (name.removesuffix(".weight") for name in self.checkpoint.tensors)
            options = [
                one for one in names if one.startswith(start) and one[len(start) :].isdecimal()
            ]
        return next((name for name in options if self.reader.has(f"{name}.weight")), None)

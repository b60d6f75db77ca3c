"""Training of the accelerators of a model's first layers, as M2R2 needs (arXiv:2502.02040).

The model stays as it is. The accelerated stream learns the distributions of the last layer on the
model's own answers, by the Kullback-Leibler divergence. It starts as the model's state before the
first layer that has an adapter.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and
`accelerators.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.accelerators import FILE_NAME, PARTS, Accelerators
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.exit_heads import divergence
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Shape, Transformer, rotate


@dataclass(frozen=True)
class AcceleratorRecipe(AnswerRecipe):
    """How accelerators are trained.

    Attributes:
        first: The first layer that has an adapter, counted from 0.
        exit: The number of layers of a draft, so that the last one with an adapter is the layer
            before; None: an eighth of the model's, and at least `first` + 1.
        rank: Numbers between the two matrices of each map.
    """

    first: int = 1
    exit: int | None = None
    rank: int = 16
    counts = ("tokens", "batch", "first", "rank")


class Adapter(nn.Module):
    """The adapter of one layer; see `Accelerators`. At first it adds nothing."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.head_width, self.eps = shape.head_width, shape.norm_eps
        width, queries = shape.width, shape.heads * shape.head_width
        sizes = {
            "query_down": (width, rank),
            "query_up": (rank, queries),
            "output_down": (queries, rank),
            "output_up": (rank, width),
            "mlp_down": (width, rank),
            "mlp_up": (rank, width),
        }
        self.maps = nn.ModuleDict(
            {part: nn.Linear(*size, bias=False) for part, size in sizes.items()}
        )
        for part in ("output_up", "mlp_up"):
            for weight in self.maps[part].parameters():
                nn.init.zeros_(weight)

    def forward(
        self,
        p: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The accelerated states behind the layer, `[batch, length, width]`, from those before it
        and the keys and values of the model's own stream, `[batch, kv_heads, length, head_width]`.
        """
        queries = self.maps["query_up"](self.maps["query_down"](self._normed(p)))
        q = rotate(queries.unflatten(-1, (-1, self.head_width)).transpose(1, 2), rope)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        mixed = attended.transpose(1, 2).flatten(-2)
        p = p + self.maps["output_up"](self.maps["output_down"](mixed))
        inner = functional.silu(self.maps["mlp_down"](self._normed(p)))
        added: torch.Tensor = p + self.maps["mlp_up"](inner)
        return added

    def _normed(self, p: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(p, p.shape[-1:], None, self.eps)


def log_probabilities(
    model: Transformer, adapters: nn.ModuleDict, tokens: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities `[rows, vocab]` of the answers' tokens: of the accelerated stream, of the
    model's own stream after the same layers, and of the last layer.

    Args:
        model: The model.
        adapters: The adapter of each layer that has one, by its number.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
    """
    rows, given = is_answer[:, 1:], tokens[:, :-1]
    indices = torch.arange(given.shape[1])
    rope = model.cos[indices], model.sin[indices]
    layers = sorted(map(int, adapters))
    x = model.transformer["wte"](given)
    for layer, block in enumerate(model.blocks):
        if layer == layers[0]:
            p = x
        q, k, v = block.heads(x, rope)
        x = block.mix(x, q, k, v, True, None)
        x = x + block.mlp(x)
        if layer in layers:
            p = adapters[str(layer)](p, k, v, rope)
        if layer == layers[-1]:
            early = x

    def of_states(states: torch.Tensor) -> torch.Tensor:
        logits = model.transformer["ff_out"](model.transformer["ln_f"](states[rows]))
        return functional.log_softmax(logits, -1)

    return of_states(p), of_states(early), of_states(x)


class AcceleratorRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: There are no such layers, there are too few answers, or the folder
            holds another run.
    """

    recipe: AcceleratorRecipe
    differs_in = "other layers, another rank or another model"

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: AcceleratorRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        shape, first = self.model.shape, recipe.first
        exit = max(first + 1, round(shape.layers / 8)) if recipe.exit is None else recipe.exit
        if not first < exit < shape.layers:
            raise InvalidRequestError(
                f"adapters from layer {first} to an exit after {exit} layers: the exit must be"
                f" behind that layer and before the last of the {shape.layers} of {checkpoint.name}"
            )
        self.layers = list(range(first, exit))
        self.fingerprint = fingerprint_of(self.model)
        torch.manual_seed(recipe.seed)
        self.adapters = nn.ModuleDict(
            {str(one): Adapter(shape, recipe.rank) for one in self.layers}
        )
        self._begin(self.adapters.parameters(), [self.fingerprint, self.layers, recipe.rank])

    @property
    def file(self) -> Path:
        """The file of the accelerators."""
        return self.folder / FILE_NAME

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/accelerators/{self.step}")
        texts = padded(self._sample(random))
        accelerated, _, last = log_probabilities(self.model, self.adapters, *texts)
        return self._learn(divergence([accelerated], last))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss of held-out answers, and how often the most probable token of the
        accelerated stream, and of the model's own after as many layers, is the last layer's."""
        equal, loss, count = [0, 0], 0.0, 0
        for texts in map(padded, self._held_out_batches()):
            *found, last = log_probabilities(self.model, self.adapters, *texts)
            loss += len(last) * float(divergence(found[:1], last))
            count += len(last)
            for index, one in enumerate(found):
                equal[index] += int((one.argmax(-1) == last.argmax(-1)).sum())
        agreement = [round(total / count, 4) for total in equal]
        self._record(agreement=agreement, held_out={"answers": loss / count})

    def _write(self) -> None:
        self.accelerators().save(self.file)

    def accelerators(self) -> Accelerators:
        """The accelerators in the engine's format."""
        parts = {
            part: {
                one: self.adapters[str(one)].maps[part].weight.detach().numpy()  # type: ignore[union-attr, index]
                for one in self.layers
            }
            for part in PARTS
        }
        return Accelerators(**parts, fingerprint=self.fingerprint)

    def log(self) -> dict[str, Any]:
        return {**super().log(), "layers": self.layers}

    def agreements(self) -> Sequence[list[float]]:
        """The agreement of the accelerated stream and of the model's own with the last layer on
        held-out answers, in the order in which it was measured."""
        return [entry["agreement"] for entry in self.history if "agreement" in entry]

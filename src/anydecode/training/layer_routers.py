"""Training of the layer routers of FiRST (arXiv:2410.12513): the model is frozen, each layer with a
router is mixed with its input by the router's probability, and the loss is that of the model's own
answers and a penalty on the layers that run.

A run has a folder, from which it can be resumed: `state.pt`, `log.json` and
`layer_routers.safetensors`.
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
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.layer_routers import FILE_NAME, LayerRouters
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class LayerRouterRecipe(AnswerRecipe):
    """How routers are trained.

    Attributes:
        penalty: Nats per layer that runs.
        first: Layers at the bottom that always run.
        last: Layers at the top that always run.
    """

    answers: int = 64
    rate: float = 1e-2
    penalty: float = 0.01
    first: int = 2
    last: int = 1
    counts = ("tokens", "batch", "rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.first, self.last, self.penalty) < 0:
            raise InvalidRequestError("first, last and penalty must be 0 or more")


class Routers(nn.Module):
    """Linear routers of some layers, which start with the score `bias` everywhere. The default is a
    probability of about .9."""

    def __init__(self, layers: Sequence[int], width: int, bias: float = 2.0) -> None:
        super().__init__()
        self.layers = list(layers)
        self.weight = nn.Parameter(torch.zeros(len(self.layers), width))
        self.bias = nn.Parameter(torch.full((len(self.layers),), bias))

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The scores `[batch, length]` of states `[batch, length, width]`; their sigmoids are
        probabilities."""
        index = self.layers.index(layer)
        scores: torch.Tensor = x @ self.weight[index] + self.bias[index]
        return scores


def routed_logits(
    model: Transformer,
    routers: Routers,
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
    threshold: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that predict the answers' tokens, `[answer tokens, vocab_size]`, and the
    probability of each layer with a router, `[layers, batch]`.

    Args:
        model: The frozen model.
        routers: Its routers.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        threshold: Layers run from this probability on, and else do not, as they do later; None:
            they are mixed with their inputs.
    """
    is_prompt = (is_answer.long().cumsum(1) == 0)[:, :-1]
    indices = torch.arange(tokens.shape[1] - 1)
    rope = model.cos[indices], model.sin[indices]
    x, gates = model.transformer["wte"](tokens[:, :-1]), []
    for layer, block in enumerate(model.blocks):
        ran = block(x, rope, True, None)
        if layer in routers.layers:
            probabilities = torch.sigmoid(routers(layer, x))
            gate = (probabilities * is_prompt).sum(1) / is_prompt.sum(1)
            gates.append(gate)
            weight = gate if threshold is None else (gate >= threshold).to(x.dtype)
            weight = weight[:, None, None]
            ran = weight * ran + (1 - weight) * x
        x = ran
    logits = model.transformer["ff_out"](model.transformer["ln_f"](x[is_answer[:, 1:]]))
    return logits, torch.stack(gates)


class LayerRouterRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: No layer is left for routers, there are too few answers, or the folder
            holds another run.
    """

    recipe: LayerRouterRecipe
    differs_in = "another model or of other layers"

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: LayerRouterRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        self.fingerprint = fingerprint_of(self.model)
        depth = self.model.shape.layers
        layers = range(recipe.first, depth - recipe.last)
        if not layers:
            raise InvalidRequestError(
                f"first={recipe.first} and last={recipe.last} leave no layer of {depth}"
            )
        self.routers = Routers(layers, self.model.shape.width)
        self._begin(self.routers.parameters(), [self.fingerprint, self.routers.layers])

    @property
    def path(self) -> Path:
        """The routers' file."""
        return self.folder / FILE_NAME

    def _update(self) -> float:
        recipe = self.recipe
        random = Random(f"{recipe.seed}/layer routers/{self.step}")
        texts = padded(self._sample(random))
        logits, gates = routed_logits(self.model, self.routers, *texts)
        loss = functional.cross_entropy(logits, answer_tokens(*texts))
        return self._learn(loss + recipe.penalty * gates.mean(1).sum())

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record, of held-out texts, the nats per token when layers are skipped, and the share of
        texts that run each layer with a router."""
        held_out = self._held_out
        loss, count, runs = 0.0, 0, torch.zeros(len(self.routers.layers))
        for pair in held_out:
            texts = padded([pair])
            logits, gates = routed_logits(self.model, self.routers, *texts, threshold=0.5)
            targets = answer_tokens(*texts)
            loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
            runs += (gates[:, 0] >= 0.5).to(runs.dtype)
        shares = (runs / len(held_out)).tolist()
        self._record(held_out={"layers skipped": loss / count}, runs=shares)

    def _write(self) -> None:
        weight, bias = (one.detach().numpy() for one in (self.routers.weight, self.routers.bias))
        LayerRouters(self.routers.layers, weight, bias, self.fingerprint).save(self.path)

    def results(self) -> dict[str, Any]:
        """The last evaluation."""
        return next(entry for entry in reversed(self.history) if "runs" in entry)


def answer_tokens(tokens: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    """The answers' tokens, `[answer tokens]`, of padded texts; see `routed_logits`."""
    return tokens[:, 1:][is_answer[:, 1:]]

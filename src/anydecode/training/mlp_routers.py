"""Training of the MLP routers of Duo-LLM (arXiv:2410.10846): the model is frozen, each MLP with a
router is mixed with what runs in its place by the router's probability, and the loss is that of the
model's own answers and a penalty on tokens that run another share of the MLPs than they should. The
probabilities become harder during training.

A run has a folder, from which it can be resumed: `state.pt`, `log.json` and
`mlp_routers.safetensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.decoders.depth.duo_llm import layers_with_choice
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.mlp_routers import FILE_NAME, NOTHING, SMALL, MlpRouters
from anydecode.models.small_mlps import SmallMlps
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.layer_routers import Routers, answer_tokens
from anydecode.training.own_answers import padded
from anydecode.training.small_mlps import logits_of, modules_of
from anydecode.training.transformer import Transformer

#: The temperature of the probabilities at the end of the training; it is 1 at the beginning.
LAST_TEMPERATURE = 0.1


@dataclass(frozen=True)
class MlpRouterRecipe(AnswerRecipe):
    """How routers are trained.

    Attributes:
        share: The share of the MLPs with a router that each token should run.
        penalty: Nats per squared difference to that share.
        layers: Layers in the middle of the model that have a router; at most all.
    """

    answers: int = 64
    rate: float = 1e-2
    share: float = 0.5
    penalty: float = 10.0
    layers: int = 8
    counts = ("tokens", "batch", "rate", "layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1 or self.penalty < 0:
            raise InvalidRequestError("share must be 0 to 1, and penalty 0 or more")


def routed_logits(
    model: Transformer,
    routers: Routers,
    small: nn.ModuleDict | None,
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that predict the answers' tokens, `[answer tokens, vocab_size]`, and the weight of
    each MLP with a router for these tokens, `[layers, answer tokens]`. Other tokens run all MLPs.

    Args:
        model: The frozen model.
        routers: Its routers.
        small: The MLPs that are mixed with the model's, by layer; None: nothing is.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        temperature: Divides the routers' scores; 0: an MLP runs in full or not at all, as later.
    """
    is_routed, weights = is_answer[:, 1:], []

    def added(layer: int, x: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = model.blocks[layer].mlp(x)
        if layer not in routers.layers:
            return full
        scores = routers(layer, x)
        weight = torch.sigmoid(scores / temperature) if temperature else (scores >= 0).to(x.dtype)
        weights.append(weight[is_routed])
        weight = torch.where(is_routed, weight, 1.0)[..., None]
        other = 0.0 if small is None else small[str(layer)](x)
        return weight * full + (1 - weight) * other

    logits = logits_of(model, added, tokens, is_answer)
    return logits, torch.stack(weights)


class MlpRouterRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        small: Small MLPs that run in place of the model's; None: nothing does.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: The small MLPs are those of another model or of other layers, there are
            too few answers, or the folder holds another run.
    """

    recipe: MlpRouterRecipe
    differs_in = "another model, other layers or other choices"

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: MlpRouterRecipe,
        small: SmallMlps | None = None,
    ) -> None:
        super().__init__(checkpoint, folder, recipe)
        self.fingerprint = fingerprint_of(self.model)
        layers = list(layers_with_choice(self.model.shape.layers, recipe.layers))
        if small is not None:
            small.check(load_network(checkpoint, None))
            if small.layers != layers:
                raise InvalidRequestError(
                    f"the small MLPs are those of layers {small.layers}, and with"
                    f" layers={recipe.layers} the routers are those of layers {layers}"
                )
        self.small = None if small is None else modules_of(self.model, small)
        self.target = NOTHING if small is None else SMALL
        self.routers = Routers(layers, self.model.shape.width, bias=0.0)
        self._begin(self.routers.parameters(), [self.fingerprint, self.target, layers])

    @property
    def path(self) -> Path:
        """The routers' file."""
        return self.folder / FILE_NAME

    def _update(self) -> float:
        recipe = self.recipe
        texts = padded(self._sample(Random(f"{recipe.seed}/MLP routers/{self.step}")))
        temperature = LAST_TEMPERATURE**self.progress
        logits, weights = routed_logits(self.model, self.routers, self.small, *texts, temperature)
        loss = functional.cross_entropy(logits, answer_tokens(*texts))
        return self._learn(loss + recipe.penalty * ((weights.mean(0) - recipe.share) ** 2).mean())

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record, of held-out answers, the nats per token with the routers' choices, and the share
        of tokens that run each MLP with a router."""
        loss, runs, count = 0.0, torch.zeros(len(self.routers.layers)), 0
        for pair in self._held_out:
            texts = padded([pair])
            logits, weights = routed_logits(self.model, self.routers, self.small, *texts, 0.0)
            targets = answer_tokens(*texts)
            loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
            runs += weights.sum(1)
            count += len(targets)
        self._record(held_out={"MLPs routed": loss / count}, runs=(runs / count).tolist())

    def _write(self) -> None:
        weight, bias = (one.detach().numpy() for one in (self.routers.weight, self.routers.bias))
        layers = self.routers.layers
        MlpRouters(layers, weight, bias, self.fingerprint, self.target).save(self.path)

    def results(self) -> dict[str, Any]:
        """The last evaluation."""
        return next(entry for entry in reversed(self.history) if "runs" in entry)

"""Training of small MLPs beside those of a frozen model, as in the first stage of Duo-LLM
(arXiv:2410.10846): each token runs, in each layer with a choice, the model's MLP or the small one,
at random, so that every choice becomes a model. The loss is that of the model's own answers.

A run has a folder, from which it can be resumed: `state.pt`, `log.json` and
`small_mlps.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.decoders.depth.duo_llm import layers_with_choice
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.small_mlps import PARTS, SmallMlps
from anydecode.training.answer_run import AnswerRecipe, AnswerRun, fingerprint_of
from anydecode.training.block_adapter import Pair
from anydecode.training.layer_routers import answer_tokens
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Norm, Transformer


@dataclass(frozen=True)
class SmallMlpRecipe(AnswerRecipe):
    """How small MLPs are trained.

    Attributes:
        width: Inner width of a small MLP.
        layers: Layers in the middle of the model that have one; at most all.
    """

    width: int = 96
    layers: int = 8
    counts = ("tokens", "batch", "width", "layers")


class SmallMlp(nn.Module):
    """A gated MLP behind a norm of its own, which starts as that of the layer, and adds nothing."""

    def __init__(self, norm: Norm, width: int) -> None:
        super().__init__()
        size = len(norm.weight)
        self.norm = Norm(size, norm.eps)
        self.norm.weight.data.copy_(norm.weight)
        self.gate, self.up = nn.Linear(size, width, bias=False), nn.Linear(size, width, bias=False)
        self.down = nn.Linear(width, size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        added: torch.Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return added


def small_mlps(modules: dict[int, nn.Module], fingerprint: str) -> SmallMlps:
    """`SmallMlp` modules, by layer, in the engine's format."""
    parts: dict[str, dict[int, Any]] = {name: {} for name in PARTS}
    for layer, mlp in modules.items():
        for name, weight in mlp.named_parameters():
            parts[name.removesuffix(".weight")][layer] = weight.detach().numpy().copy()
    return SmallMlps(**parts, fingerprint=fingerprint)


def modules_of(model: Transformer, mlps: SmallMlps) -> nn.ModuleDict:
    """The MLPs of a file, by layer."""
    modules = nn.ModuleDict()
    for layer in mlps.layers:
        module = SmallMlp(model.blocks[layer].ff_norm, len(mlps.gate[layer]))
        for name, weight in module.named_parameters():
            tensor = getattr(mlps, name.removesuffix(".weight"))[layer]
            weight.data.copy_(torch.from_numpy(tensor))
        modules[str(layer)] = module
    return modules.requires_grad_(False)


def mixed_logits(
    model: Transformer,
    mlps: nn.ModuleDict,
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
    is_small: torch.Tensor,
) -> torch.Tensor:
    """The logits that predict the answers' tokens, `[answer tokens, vocab_size]`.

    Args:
        model: The frozen model.
        mlps: The small MLPs, by layer.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        is_small: bool `[layers with a choice, batch, length - 1]`: whether a token runs the small
            MLP.
    """
    choices = iter(is_small)

    def added(layer: int, x: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = model.blocks[layer].mlp(x)
        if str(layer) not in mlps:
            return full
        return torch.where(next(choices)[..., None], mlps[str(layer)](x), full)

    return logits_of(model, added, tokens, is_answer)


def logits_of(
    model: Transformer,
    added: Callable[[int, torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
) -> torch.Tensor:
    """As `mixed_logits`, of a model whose layers have something else in the place of MLPs: `added`
    returns what a layer adds to the states behind its attention, both `[batch, length - 1,
    width]`."""
    indices = torch.arange(tokens.shape[1] - 1)
    rope = model.cos[indices], model.sin[indices]
    x = model.transformer["wte"](tokens[:, :-1])
    for layer, block in enumerate(model.blocks):
        x = block.attend(x, rope, True, None)
        x = x + added(layer, x)
    return model.head(model.transformer["ln_f"](x[is_answer[:, 1:]]))


class SmallMlpRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: There are too few answers, or the folder holds another run.
    """

    recipe: SmallMlpRecipe
    differs_in = "another model or width, or other layers"

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: SmallMlpRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        self.fingerprint = fingerprint_of(self.model)
        layers = list(layers_with_choice(self.model.shape.layers, recipe.layers))
        torch.manual_seed(recipe.seed)
        self.mlps = nn.ModuleDict(
            {str(one): SmallMlp(self.model.blocks[one].ff_norm, recipe.width) for one in layers}
        )
        self._begin(self.mlps.parameters(), [self.fingerprint, recipe.width, layers])

    @property
    def path(self) -> Path:
        """The file of the small MLPs."""
        return self.folder / "small_mlps.safetensors"

    def _loss(
        self, pairs: Sequence[Pair], share: float, generator: torch.Generator
    ) -> torch.Tensor:
        """The mean cross-entropy of the answers' tokens where small MLPs run with the probability
        `share`."""
        tokens, is_answer = padded(pairs)
        shape = len(self.mlps), len(tokens), tokens.shape[1] - 1
        is_small = torch.rand(shape, generator=generator) < share
        logits = mixed_logits(self.model, self.mlps, tokens, is_answer, is_small)
        return functional.cross_entropy(logits, answer_tokens(tokens, is_answer))

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/small MLPs/{self.step}")
        generator = torch.Generator().manual_seed(random.getrandbits(63))
        return self._learn(self._loss(self._sample(random), 0.5, generator))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the nats per token of held-out answers with small MLPs at random, and with these
        alone."""
        losses: dict[str, float] = {}
        for name, share in (("half of them small", 0.5), ("all of them small", 1.0)):
            generator = torch.Generator().manual_seed(self.recipe.seed)
            total = count = 0.0
            for pair in self._held_out:
                total += len(pair[1]) * float(self._loss([pair], share, generator))
                count += len(pair[1])
            losses[name] = total / count
        self._record(held_out=losses)

    def mlps_of_layers(self) -> SmallMlps:
        """The small MLPs in the engine's format."""
        return small_mlps({int(one): mlp for one, mlp in self.mlps.items()}, self.fingerprint)

    def _write(self) -> None:
        self.mlps_of_layers().save(self.path)

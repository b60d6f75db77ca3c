"""Training of a model on a schedule of layers that falls with the position, as SkipDecode needs
(Del Corro et al., arXiv:2307.02628).

Each token of an answer runs the layers that the decoder would run for it; prompts run all. No token
attends in a layer to one that has not run it, because later tokens run fewer layers. A low-rank
adapter (Hu et al., arXiv:2106.09685) is trained on the model's own answers, which all of its layers
wrote, and merged into the model that is written.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from anydecode.decoders.depth.skipdecode import SkipDecode
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair
from anydecode.training.low_rank_run import LowRankRecipe, LowRankTextRun
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class ScheduleRecipe(LowRankRecipe):
    """How a model is trained. The schedule ends at `tokens`, the limit of an answer.

    Attributes:
    """


def scheduled_layers(
    decoder: SkipDecode, num_layers: int, pairs: Sequence[Pair], limit: int
) -> torch.Tensor:
    """bool `[layers, batch, length]`: the layers that each token of padded texts runs, in answers
    of up to `limit` tokens."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    runs = torch.ones(num_layers, len(pairs), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        for index in range(len(answer)):
            left_out = decoder.left_out(num_layers, index, limit)
            runs[sorted(left_out), row, len(prompt) + index] = False
    return runs


def scheduled_logits(
    model: Transformer, tokens: torch.Tensor, runs: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The logits `[selected, vocab]` of a text whose tokens run some of the layers.

    Args:
        model: The model.
        tokens: `[batch, length]`.
        runs: bool `[layers, batch, length]`: a token's layers contain those of all after it.
        rows: bool `[batch, length]`: the positions whose logits are returned.
    """
    indices = torch.arange(tokens.shape[1])
    rope = model.cos[indices], model.sin[indices]
    x = model.transformer["wte"](tokens)
    for block, active in zip(model.blocks, runs, strict=True):
        x = torch.where(active[..., None], block(x, rope, True, None), x)
    logits: torch.Tensor = model.transformer["ff_out"](model.transformer["ln_f"](x[rows]))
    return logits


class ScheduleRun(LowRankTextRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        decoder: The decoder that will use the model.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: The model has fewer layers, there are too few answers, or the folder
            holds another run.
    """

    recipe: ScheduleRecipe
    differs_in = "another rank, schedule or model"
    name = "schedule"

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: ScheduleRecipe, decoder: SkipDecode
    ) -> None:
        super().__init__(checkpoint, folder, recipe)
        self.decoder = decoder
        num_layers = self.model.shape.layers
        decoder.check(num_layers)
        schedule = [
            sorted(decoder.left_out(num_layers, index, recipe.tokens))
            for index in range(recipe.tokens)
        ]
        self._adapt([schedule])

    def loss(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, int]:
        tokens, is_answer = padded(pairs)
        runs = scheduled_layers(self.decoder, self.model.shape.layers, pairs, self.recipe.tokens)
        rows = is_answer[:, 1:]
        logits = scheduled_logits(self.model, tokens[:, :-1], runs[..., :-1], rows)
        return functional.cross_entropy(logits, tokens[:, 1:][rows]), len(logits)

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
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional

from anydecode.decoders.depth.skipdecode import SkipDecode
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.block_adapter import Pair, add_low_rank, merged_weights, open_llama
from anydecode.training.checkpoint import load_state, save_json, save_nested_llama, save_state
from anydecode.training.nested import answers_to_learn_from, padded
from anydecode.training.run import AnswerRecipe, LossRun
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class ScheduleRecipe(AnswerRecipe):
    """How a model is trained. The schedule ends at `tokens`, the limit of an answer.

    Attributes:
        batch: Texts per step.
        rank: Rank of the adapter.
    """

    batch: int = 4
    rank: int = 16
    counts = ("tokens", "batch", "rank")


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


class ScheduleRun(LossRun):
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

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: ScheduleRecipe, decoder: SkipDecode
    ) -> None:
        tokenizer = checkpoint.tokenizer
        if not isinstance(tokenizer, HFTokenizer):
            raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be written")
        super().__init__(folder, recipe)
        self.tokenizer, self.recipe, self.decoder = tokenizer, recipe, decoder
        self.model = open_llama(checkpoint)
        decoder.check(self.model.shape.layers)
        torch.manual_seed(recipe.seed)
        self.trained = add_low_rank(self.model, recipe.rank)
        self.optimizer = torch.optim.AdamW(self.trained, recipe.rate, (0.9, 0.95), weight_decay=0.0)
        state = load_state(folder / "state.pt")
        if state is None:
            self.pairs = answers_to_learn_from(
                checkpoint, recipe.answers, recipe.tokens, recipe.seed
            )
        else:
            self._restore(state)

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def loss(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, int]:
        """The mean cross-entropy of the answers' tokens, and their number."""
        tokens, is_answer = padded(pairs)
        runs = scheduled_layers(self.decoder, self.model.shape.layers, pairs, self.recipe.tokens)
        rows = is_answer[:, 1:]
        logits = scheduled_logits(self.model, tokens[:, :-1], runs[..., :-1], rows)
        return functional.cross_entropy(logits, tokens[:, 1:][rows]), len(logits)

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/schedule/{self.step}")
        trained = self.pairs[self._num_held_out :]
        loss, _ = self.loss(random.sample(trained, min(self.recipe.batch, len(trained))))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._descend(self.optimizer, self.trained, self.recipe.rate)
        return float(loss.detach())

    @property
    def _num_held_out(self) -> int:
        return max(1, len(self.pairs) // 8)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the loss of held-out answers."""
        total, count = 0.0, 0
        for start in range(0, self._num_held_out, self.recipe.batch):
            end = min(start + self.recipe.batch, self._num_held_out)
            loss, num_tokens = self.loss(self.pairs[start:end])
            total, count = total + num_tokens * float(loss), count + num_tokens
        self._record(held_out={"answers": total / count})

    def save(self) -> None:
        """Evaluate, and write the state, the log and the model."""
        self._evaluate()
        state = {
            "trained": [weight.data for weight in self.trained],
            "optimizer": self.optimizer.state_dict(),
            "settings": self._settings(),
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        weights, shape = merged_weights(self.model), self.model.shape
        save_nested_llama(self.model_folder, weights, shape, self.tokenizer)

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {"recipe": asdict(self.recipe), "steps": self.step, "history": self.history}

    def held_out_losses(self) -> Sequence[float]:
        """The losses of held-out answers, in nats per token, in the order in which they were
        measured."""
        return [entry["held_out"]["answers"] for entry in self.history if "held_out" in entry]

    def _settings(self) -> list[Any]:
        """What a resumed run must have in common with the one before."""
        schedule = [
            sorted(self.decoder.left_out(self.model.shape.layers, index, self.recipe.tokens))
            for index in range(self.recipe.tokens)
        ]
        return [asdict(self.model.shape), self.recipe.rank, schedule]

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("settings") != self._settings():
            raise InvalidRequestError(
                f"{self.folder} holds a run of another rank, schedule or model: give another folder"
            )
        for weight, stored in zip(self.trained, state["trained"], strict=True):
            weight.data.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])


_STATE_FIELDS = ("step", "seconds", "history", "pairs")

"""Training of the layer routers of FiRST (arXiv:2410.12513): the model is frozen, each layer with a
router is mixed with its input by the router's probability, and the loss is that of the model's own
answers and a penalty on the layers that run.

A run has a folder, from which it can be resumed: `state.pt`, `log.json` and
`layer_routers.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.families import load_network
from anydecode.models.layer_routers import FILE_NAME, LayerRouters
from anydecode.training.block_adapter import open_llama
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.nested import own_answers, padded
from anydecode.training.run import AnswerRecipe, LossRun
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class LayerRouterRecipe(AnswerRecipe):
    """How routers are trained.

    Attributes:
        batch: Texts per step.
        penalty: Nats per layer that runs.
        first: Layers at the bottom that always run.
        last: Layers at the top that always run.
    """

    answers: int = 64
    batch: int = 4
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
    """Linear routers of some layers. They start at a probability of about .9."""

    def __init__(self, layers: Sequence[int], width: int) -> None:
        super().__init__()
        self.layers = list(layers)
        self.weight = nn.Parameter(torch.zeros(len(self.layers), width))
        self.bias = nn.Parameter(torch.full((len(self.layers),), 2.0))

    def forward(self, layer: int, x: torch.Tensor, is_prompt: torch.Tensor) -> torch.Tensor:
        """The mean probability over each text's prompt, `[batch]`, from the layer's inputs `[batch,
        length, width]`; `is_prompt` is bool `[batch, length]`."""
        index = self.layers.index(layer)
        probabilities = torch.sigmoid(x @ self.weight[index] + self.bias[index])
        return (probabilities * is_prompt).sum(1) / is_prompt.sum(1)


def routed_logits(
    model: Transformer,
    routers: Routers,
    tokens: torch.Tensor,
    is_answer: torch.Tensor,
    is_hard: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that predict the answers' tokens, `[answer tokens, vocab_size]`, and the
    probability of each layer with a router, `[layers, batch]`.

    Args:
        model: The frozen model.
        routers: Its routers.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        is_hard: Whether layers run or do not, as they do later, instead of being mixed with their
            inputs.
    """
    is_prompt = (is_answer.long().cumsum(1) == 0)[:, :-1]
    indices = torch.arange(tokens.shape[1] - 1)
    rope = model.cos[indices], model.sin[indices]
    x, gates = model.transformer["wte"](tokens[:, :-1]), []
    for layer, block in enumerate(model.blocks):
        ran = block(x, rope, True, None)
        if layer in routers.layers:
            gate = routers(layer, x, is_prompt)
            gates.append(gate)
            weight = ((gate >= 0.5).to(x.dtype) if is_hard else gate)[:, None, None]
            ran = weight * ran + (1 - weight) * x
        x = ran
    logits = model.transformer["ff_out"](model.transformer["ln_f"](x[is_answer[:, 1:]]))
    return logits, torch.stack(gates)


class LayerRouterRun(LossRun):
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

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: LayerRouterRecipe) -> None:
        super().__init__(folder, recipe)
        self.recipe, self.model = recipe, open_llama(checkpoint)
        self.fingerprint = model_fingerprint(load_network(checkpoint, None))
        depth = self.model.shape.layers
        layers = range(recipe.first, depth - recipe.last)
        if not layers:
            raise InvalidRequestError(
                f"first={recipe.first} and last={recipe.last} leave no layer of {depth}"
            )
        self.routers = Routers(layers, self.model.shape.width)
        self.optimizer = torch.optim.AdamW(self.routers.parameters(), recipe.rate, weight_decay=0.0)
        state = load_state(folder / "state.pt")
        if state is None:
            count = recipe.answers
            self.pairs = own_answers(checkpoint, count, recipe.tokens, recipe.seed)
            if len(self.pairs) < 2:
                raise InvalidRequestError(
                    f"{checkpoint.name} has written {len(self.pairs)} of {count} answers, and"
                    " training needs 2: give more answers"
                )
        else:
            self._restore(state)

    @property
    def path(self) -> Path:
        """The routers' file."""
        return self.folder / FILE_NAME

    def _update(self) -> float:
        recipe = self.recipe
        random = Random(f"{recipe.seed}/layer routers/{self.step}")
        trained = self.pairs[self._num_held_out :]
        texts = padded(random.sample(trained, min(recipe.batch, len(trained))))
        logits, gates = routed_logits(self.model, self.routers, *texts)
        loss = functional.cross_entropy(logits, _targets(*texts))
        loss = loss + recipe.penalty * gates.mean(1).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._descend(self.optimizer, self.routers.parameters(), recipe.rate)
        return float(loss.detach())

    @property
    def _num_held_out(self) -> int:
        return max(1, len(self.pairs) // 8)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record, of held-out texts, the nats per token when layers are skipped, and the share of
        texts that run each layer with a router."""
        held_out = self.pairs[: self._num_held_out]
        loss, count, runs = 0.0, 0, torch.zeros(len(self.routers.layers))
        for pair in held_out:
            texts = padded([pair])
            logits, gates = routed_logits(self.model, self.routers, *texts, is_hard=True)
            targets = _targets(*texts)
            loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
            runs += (gates[:, 0] >= 0.5).to(runs.dtype)
        shares = (runs / len(held_out)).tolist()
        self._record(held_out={"layers skipped": loss / count}, runs=shares)

    def save(self) -> None:
        """Evaluate, and write the state, the log and the routers."""
        self._evaluate()
        state = {
            "weights": self.routers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "layers": self.routers.layers,
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_state(self.folder / "state.pt", state)
        save_json(self.folder / "log.json", self.log())
        weight, bias = (one.detach().numpy() for one in (self.routers.weight, self.routers.bias))
        LayerRouters(self.routers.layers, weight, bias, self.fingerprint).save(self.path)

    def log(self) -> dict[str, Any]:
        """Recipe and history as plain JSON."""
        return {"recipe": asdict(self.recipe), "steps": self.step, "history": self.history}

    def results(self) -> dict[str, Any]:
        """The last evaluation."""
        return next(entry for entry in reversed(self.history) if "runs" in entry)

    def _restore(self, state: dict[str, Any]) -> None:
        is_same = state.get("layers") == self.routers.layers
        if state.get("fingerprint") != self.fingerprint or not is_same:
            raise InvalidRequestError(
                f"{self.folder} holds a run of another model or of other layers: give another"
                " folder"
            )
        self.routers.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])


_STATE_FIELDS = ("step", "seconds", "history", "pairs", "fingerprint")


def _targets(tokens: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    return tokens[:, 1:][is_answer[:, 1:]]

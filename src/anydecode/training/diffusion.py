"""Training of the small models: an autoregressive stage, then masked diffusion from its weights.

Starting from next-token prediction is worth more than the same number of diffusion steps (Gong et
al., DiffuLLaMA, arXiv:2410.17891). At this size neither their logit shift nor annealing the mask
helps, so the stage switches to full attention at once and logits are not shifted, as in LLaDA.
The noise may be random tokens instead of masks, for the decoders of uniform-state diffusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from anydecode.errors import InvalidRequestError
from anydecode.kernels.native import thread_count
from anydecode.tasks.tasks import TASKS, examples
from anydecode.training import checkpoint, denoising
from anydecode.training.data import batches
from anydecode.training.objectives import NOISES, causal_loss, diffusion_loss, uniform_loss
from anydecode.training.run import TrainingRun
from anydecode.training.tokenizer import build_tokenizer
from anydecode.training.transformer import Shape, Transformer

STAGES = ("autoregressive", "diffusion")
#: Fraction of the budget for the autoregressive stage.
FIRST_STAGE_FRACTION = 0.3


@dataclass(frozen=True)
class DiffusionRecipe:
    """How a run trains. One of `minutes` and `steps` is the budget; `noise` is one of `NOISES`."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    batch: int = 64
    rate: float = 1.5e-3
    warmup: int = 50
    decay: float = 0.01
    clip: float = 1.0
    average: float = 0.998
    save_seconds: float = 180.0
    checks: int = 4  # held-out examples per task in an evaluation
    noise: str = "mask"

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidRequestError("a training run takes either minutes or steps")
        if (self.minutes or self.steps or 0) <= 0:
            raise InvalidRequestError("minutes or steps of a training run must be more than 0")
        if self.noise not in NOISES:
            raise InvalidRequestError(
                f"the noise {self.noise!r} is unknown; choose from {', '.join(NOISES)}"
            )


class DiffusionRun(TrainingRun[float]):
    """A training run in a folder, from which it can be resumed.

    `state.pt` is the state to resume from, `log.json` the history; `diffusion/` and
    `autoregressive/` hold the checkpoints of the averaged weights.
    """

    def __init__(self, folder: Path, recipe: DiffusionRecipe, shape: Shape | None = None) -> None:
        super().__init__(folder, recipe)
        self.recipe = recipe
        tokenizer_file = folder / "tokenizer.json"
        self.tokenizer = (
            Tokenizer.from_file(str(tokenizer_file))
            if tokenizer_file.is_file()
            else build_tokenizer()
        )
        self.shape = shape or Shape(vocab=self.tokenizer.get_vocab_size())
        torch.manual_seed(recipe.seed)
        self.model = Transformer(self.shape)
        self.stage, self.stage_step = 0, 0
        self._start_stage()
        state = checkpoint.load_state(folder / "state.pt")
        if state is not None:
            self._restore(state)

    def _start_stage(self) -> None:
        self.stage_step = 0
        self.average = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        matrices = [weight for weight in self.model.parameters() if weight.dim() == 2]
        vectors = [weight for weight in self.model.parameters() if weight.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    def train(self, report: Callable[[DiffusionRun], None] = lambda run: None) -> None:
        """Train until the budget is spent; calls `report` after every step. Ctrl-C saves too."""
        losses: list[float] = []
        try:
            for loss in self._updates():
                losses.append(loss)
                if self.step % 20 == 0:
                    self._record(loss=sum(losses) / len(losses))
                    losses.clear()
                report(self)
        finally:
            self.save()

    def _end_first_stage(self) -> None:
        self.save()
        self.model.load_state_dict(self.average)
        self.stage = 1
        self._start_stage()

    def _update(self) -> float:
        if self.stage == 0 and self.progress >= FIRST_STAGE_FRACTION:
            self._end_first_stage()
        recipe = self.recipe
        parts = batches(self.tokenizer, recipe.batch, recipe.seed, self.step)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums: list[float] = []
        total = torch.zeros(())
        for part in parts:
            if self.stage == 0:
                loss, weight = causal_loss(self.model, part)
            else:
                diffusion = uniform_loss if recipe.noise == "uniform" else diffusion_loss
                loss, weight = diffusion(self.model, part, generator)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.append(float(loss.detach()))
            total += weight
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= total
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.step += 1
        self.stage_step += 1
        decay = min(recipe.average, self.stage_step / (self.stage_step + 10))
        for name, weight in self.model.state_dict().items():
            self.average[name].lerp_(weight, 1 - decay)
        return sum(sums) / float(total)

    def _rate(self) -> float:
        """The learning rate: in each stage a warm-up, then a half cosine."""
        begin, end = ((0.0, FIRST_STAGE_FRACTION), (FIRST_STAGE_FRACTION, 1.0))[self.stage]
        stage_progress = min(1.0, (self.progress - begin) / (end - begin))
        schedule = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * stage_progress))
        return self.recipe.rate * schedule * min(1.0, (self.stage_step + 1) / self.recipe.warmup)

    def _record(self, **values: Any) -> None:
        super()._record(stage=STAGES[self.stage], **values)

    def save(self) -> None:
        """Evaluate the averaged weights, then write them, the history and the state."""
        model = Transformer(self.shape)
        model.load_state_dict(self.average)
        self._record(accuracy=self.evaluate(model.eval()))
        write = (checkpoint.save_llama, checkpoint.save_llada)[self.stage]
        write(self.checkpoint, self.average, self.shape, self.tokenizer)
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        checkpoint.save_json(self.folder / "log.json", self.log())
        state = {"model": self.model.state_dict(), "average": self.average}
        numbers = {name: getattr(self, name) for name in _STATE_FIELDS}
        state |= {"optimizer": self.optimizer.state_dict(), "shape": asdict(self.shape), **numbers}
        checkpoint.save_state(self.folder / "state.pt", state)

    @property
    def checkpoint(self) -> Path:
        """The folder of the current stage's model."""
        return self.folder / STAGES[self.stage]

    def log(self) -> dict[str, Any]:
        """Recipe, shape and history as plain JSON."""
        parts = {"recipe": asdict(self.recipe), "shape": asdict(self.shape)}
        return {**parts, "parameters": self.size, "history": self.history}

    @property
    def size(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _restore(self, state: dict[str, Any]) -> None:
        if state["shape"] != asdict(self.shape):
            raise InvalidRequestError(
                f"{self.folder} holds a run of another shape: give another folder"
            )
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])

    def evaluate(self, model: Transformer) -> dict[str, float]:
        """Accuracy on a few held-out examples of every task, and the mean over tasks."""
        recipe = self.recipe
        by_task = {task: [*examples(task, recipe.checks, seed=recipe.seed + 1)] for task in TASKS}
        all_examples = [example for group in by_task.values() for example in group]
        prompts = [self.tokenizer.encode(example.prompt).ids for example in all_examples]
        if self.stage == 0:
            answers = denoising.continue_greedily(model, prompts, 32)
        elif recipe.noise == "uniform":
            answers = denoising.denoise_uniform(model, prompts, 32, 16)
        else:
            answers, _ = denoising.denoise(model, prompts, 32, 0.9)
        results: dict[str, float] = {}
        for task, group in by_task.items():
            task_answers, answers = answers[: len(group)], answers[len(group) :]
            results[task] = denoising.accuracy(group, task_answers, self.tokenizer)
        return {**results, "all": sum(results.values()) / len(results)}


_STATE_FIELDS = ("step", "seconds", "stage", "stage_step", "history")


def limit_threads(threads: int) -> None:
    """Set torch's number of threads; 0 leaves its default.

    Raises:
        InvalidRequestError: The number is not in the range of `thread_count`.
    """
    if threads:
        torch.set_num_threads(thread_count(threads))

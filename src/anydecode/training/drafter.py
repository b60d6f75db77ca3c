"""Training of drafters that read the states of their target, on text that the target writes itself.

A run has a folder, from which it can be resumed: `data/` (see `DrafterData`), `state.pt`,
`log.json`, and `drafter/`, the drafter in the layout of released checkpoints. What the drafter is
and how it learns is its recipe's (`training/drafters/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.drafter_data import NUM_HELD_OUT, DrafterData, EngineWriter
from anydecode.training.drafter_evaluation import DEPTH, measure
from anydecode.training.drafters import find_recipe
from anydecode.training.drafters.learner import Learner, StepLosses
from anydecode.training.run import TrainingRun, check_budget
from anydecode.training.target import TorchTarget, open_target

#: Calls with the stage of a run and the fraction of it that is done, and a detail to print; the
#: first call of a stage has what runs before have done of it.
Report = Callable[[str, float, str], None]


@dataclass(frozen=True)
class DrafterOptions:
    """How a drafter is trained. One of `minutes` and `steps` is the budget of the training itself.

    Attributes:
        minutes: See above.
        steps: See above.
        recipe: The kind of drafter; see `RECIPES`.
        texts: Number of texts that the model writes.
        tokens: Maximum number of tokens of an answer.
        vocabulary: Number of tokens that the drafter's head has.
        depth: Number of tokens that it learns to draft: draft steps, heads or slots of a block. The
            recipe's by default.
        batch: Texts per step.
        rate: Peak learning rate. The recipe's by default.
        seed: Random seed.
        save_seconds: Seconds between saved states.
        has_head: Whether the drafter's files have the rows of its head. They are the target's, from
            which anydecode takes them otherwise; other engines need them.
        device: A device of torch, such as "cuda", on which texts are written, states are computed
            (none are stored) and the drafter is trained. None: the engine writes the texts and
            collects the states, and the drafter is trained on the CPU.
    """

    minutes: float | None = None
    steps: int | None = None
    recipe: str = "eagle-3"
    texts: int = 4000
    tokens: int = 256
    vocabulary: int = 8192
    depth: int | None = None
    batch: int = 2
    rate: float | None = None
    seed: int = 0
    save_seconds: float = 300.0
    has_head: bool = True
    device: str | None = None

    def __post_init__(self) -> None:
        find_recipe(self.recipe)
        check_budget(self)
        sizes = (self.tokens, self.vocabulary, self.batch)
        given = [value for value in (self.minutes, self.steps, self.depth) if value is not None]
        if min(*sizes, *given) <= 0:
            raise InvalidRequestError(
                "minutes or steps, tokens, vocabulary, depth and batch must be more than 0"
            )
        if self.texts <= NUM_HELD_OUT:
            raise InvalidRequestError(
                f"texts is {self.texts}; allowed are more than {NUM_HELD_OUT}, of which"
                f" {NUM_HELD_OUT} are held out"
            )


class DrafterRun(TrainingRun[list[float]]):
    """A training run of a drafter in a folder.

    Args:
        model: The target, in any of the forms that `LLM` takes a path in.
        folder: The run's folder: new, or that of an interrupted run to resume.
        options: How to train.
        dtype: The weight format of the target, whose states and answers are learned.
        data: The folder of the texts and states, to which those that are missing are added; by
            default one in the run's folder. Runs of several recipes can share one.
    """

    def __init__(
        self,
        model: str | Path,
        folder: Path,
        options: DrafterOptions,
        dtype: str | None = None,
        data: Path | None = None,
    ) -> None:
        super().__init__(folder, options)
        self.model_path, self.dtype = model, dtype
        self.recipe = find_recipe(options.recipe)
        self.options = replace(
            options,
            depth=options.depth or self.recipe.default_depth,
            rate=options.rate or self.recipe.default_rate,
        )
        self.target: Checkpoint = load_checkpoint(model)
        self.network: Network = load_network(self.target, dtype)
        spec = self.network.spec
        source = {"model": self.target.name, "dtype": dtype}
        taps = self.recipe.taps(spec.num_layers)
        self.torch_target: TorchTarget | None = None
        if options.device is not None:
            self.torch_target = open_target(
                self.network, self.target.tokenizer, self.target.name, options.device
            )
        self.device = torch.device(options.device or "cpu")
        self.data = DrafterData(data or folder / "data", source, taps, spec.hidden_size)
        self.vocabulary: list[int] = []
        self.results: dict[str, Any] = {}

    @property
    def drafter(self) -> Path:
        """The folder of the drafter."""
        return self.folder / "drafter"

    @property
    def depth(self) -> int:
        """Number of tokens that the drafter learns to draft."""
        return self.options.depth or self.recipe.default_depth

    def run(self, report: Report = lambda *_: None) -> None:
        """Write texts, collect states, train, and evaluate the drafter; what a run before has done
        is not repeated.

        Raises:
            UnsupportedCombinationError: No drafter of this kind can be trained for the model.
            InvalidRequestError: The folder holds another run.
        """
        self._check_state()
        self.recipe(self.network, [0], self.depth, 0)  # refuses a model before texts are written
        self.collect(report)
        self.train(report)
        self.evaluate(report)
        self._save_log()

    def collect(self, report: Report = lambda *_: None) -> None:
        """Write the texts and collect the states that are missing."""
        options = self.options

        def written(done: float) -> None:
            report("texts", done, f"{len(self.data.texts)} texts")

        written(min(1.0, len(self.data.texts) / options.texts))
        if self.torch_target is not None:
            self.data.generate(
                self.torch_target, options.texts, options.tokens, options.seed, written
            )
            return
        with LLM(self.model_path, dtype=self.dtype, threads=torch.get_num_threads()) as llm:
            self.data.generate(
                EngineWriter(llm), options.texts, options.tokens, options.seed, written
            )
            self.data.collect(llm, lambda done: report("states", done, ""))

    # --- training

    def train(self, report: Report = lambda *_: None) -> None:
        """Train until the budget is spent. Ctrl-C saves too."""
        self.prepare()
        sums: list[list[float]] = []
        report("training", self.progress, "")
        if not self.step:
            self._record_held_out()
        try:
            for accepted in self._updates():
                sums.append(accepted)
                if self.step % 10 == 0:
                    self._record(acceptance=_means(sums[-10:]))
                if self.step % 200 == 0:
                    self._record_held_out()
                first = _means(sums[-10:])[0]
                report("training", self.progress, f"accepted first drafts: {first:.3f}")
            self._record_held_out()
        finally:
            self.save()

    def prepare(self) -> None:
        """Make the drafter, untrained or as the run before has left it."""
        options, spec, data = self.options, self.network.spec, self.data
        state = self._check_state()
        if state is not None:
            data.limit(state["num_texts"])
        self.vocabulary = data.vocabulary(options.vocabulary, spec.vocab_size)
        torch.manual_seed(options.seed)
        mask = data.unused_token(spec.vocab_size)
        self.learner: Learner = self.recipe(self.network, self.vocabulary, self.depth, mask)
        self.learner.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.learner.parameters(), self._rate, (0.9, 0.95), weight_decay=0.01
        )
        if state is not None:
            if state["drafted_tokens"] != self.vocabulary:
                raise InvalidRequestError(
                    f"{self.folder}: was trained on other texts; give the same --data, or another"
                    " --out"
                )
            self.learner.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
            self.history = state["history"]

    @property
    def _rate(self) -> float:
        return self.options.rate or self.recipe.default_rate

    def _check_state(self) -> dict[str, Any] | None:
        """The saved state. Raises InvalidRequestError if its run had other settings."""
        state = load_state(self.folder / "state.pt")
        if state is None:
            return None
        for name, given in self._settings().items():
            if state.get(name) != given:
                raise InvalidRequestError(
                    f"{self.folder}: was trained with {name} {state.get(name)}, not {given}; give"
                    " the same, or another --out"
                )
        return state

    def _settings(self) -> dict[str, Any]:
        """Those that a resumed run must have too."""
        options = self.options
        return {
            "recipe": self.recipe.recipe,
            "depth": self.depth,
            "texts": options.texts,
            "vocabulary": options.vocabulary,
        }

    def _indices(self) -> list[int]:
        """The texts of the current step: every text once per epoch, in an order that depends on
        the seed and the epoch."""
        size, count = self.options.batch, len(self.data.texts) - NUM_HELD_OUT
        per_epoch = len(self.data.batches(range(count), size))
        epoch, index = divmod(self.step, per_epoch)
        random = Random(f"{self.options.seed}/drafter/{epoch}")
        indices = list(range(NUM_HELD_OUT, len(self.data.texts)))
        random.shuffle(indices)
        batches = self.data.batches(indices, size)
        random.shuffle(batches)
        return batches[index]

    def _update(self) -> list[float]:
        losses = self._losses(self._indices(), self.step)
        decay = self.recipe.step_decay
        total = sum(
            (decay**step * one.loss / max(1, one.count) for step, one in enumerate(losses)),
            torch.zeros((), device=self.device),
        )
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            warmup = min(1.0, max((self.step + 1) / 100, self.progress / 0.04))
            schedule = 0.1 + 0.45 * (1 + math.cos(math.pi * self.progress))
            group["lr"] = self._rate * warmup * schedule
        self.optimizer.step()
        self.step += 1
        return [one.accepted / max(1, one.count) for one in losses]

    def _losses(self, indices: list[int], step: int) -> list[StepLosses]:
        random = torch.Generator(self.device).manual_seed(
            Random(f"{self.options.seed}/{step}").getrandbits(63)
        )
        batch = self.data.load(indices, self.torch_target)
        self.learner.train(step >= 0).progress = self.progress
        with self.device, torch.autocast(self.device.type, torch.bfloat16):
            return self.learner.losses(batch, random)

    @torch.no_grad()
    def _held_out(self) -> list[float]:
        """The probability that a draft is accepted on held-out texts, by draft step."""
        sums = np.zeros((2, self.depth))
        for number, indices in enumerate(
            self.data.batches(range(NUM_HELD_OUT), self.options.batch)
        ):
            for step, one in enumerate(self._losses(indices, -1 - number)):
                sums[:, step] += one.accepted, one.count
        return [float(value) for value in sums[0] / sums[1].clip(1)]

    def _record_held_out(self) -> None:
        """Record the held-out acceptance at this step, unless a run before has."""
        if all(one["step"] != self.step for one in self.history if "held_out" in one):
            self._record(held_out=self._held_out())

    def _record(self, **values: list[float]) -> None:
        rounded = {name: [round(one, 4) for one in value] for name, value in values.items()}
        super()._record(**rounded)

    def save(self) -> None:
        """Write the state, the log and the drafter."""
        state = {
            **self._settings(),
            "weights": self.learner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "num_texts": len(self.data.texts),
            "drafted_tokens": self.vocabulary,
        }
        save_state(self.folder / "state.pt", state)
        self._save_log()
        save_drafter(self.drafter, self.learner, self.target.config, self.options.has_head)

    def _save_log(self) -> None:
        save_json(self.folder / "log.json", self.log())

    def log(self) -> dict[str, Any]:
        """The options, the history, and the results."""
        data = {
            "texts": len(self.data.texts),
            "tokens": self.data.starts[-1],
            "head_coverage": round(self.data.coverage(self.vocabulary), 4),
        }
        return {
            "options": asdict(self.options),
            "decoder": self.recipe.key,
            "data": data,
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "history": self.history,
            "results": self.results,
        }

    def evaluate(self, report: Report = lambda *_: None) -> None:
        """Measure the written drafter in the engine, on held-out prompts; see `measure`."""
        report("evaluation", 0.0, "")
        prompts = [text.prompt for text in self.data.texts[:NUM_HELD_OUT]]
        threads = torch.get_num_threads()
        depth = min(DEPTH, self.learner.max_drafts or DEPTH)
        decoder = self.learner.decoder.format(depth)
        with LLM(
            self.model_path,
            draft=self.drafter,
            dtype=self.dtype,
            threads=threads,
            drafting="fixed",
        ) as llm:
            for temperature in (0.0, 0.8):
                self.results[f"temperature {temperature}"] = measure(
                    llm,
                    prompts,
                    decoder,
                    depth,
                    self.options.tokens,
                    temperature,
                    self.options.seed,
                )
                report("evaluation", 0.5 if temperature == 0 else 1.0, "")


def _means(rows: list[list[float]]) -> list[float]:
    return [float(value) for value in np.mean(rows, 0)]


def save_drafter(
    folder: Path, learner: Learner, target: dict[str, Any], has_head: bool = True
) -> None:
    """Write a drafter in the layout of its kind, with matrices in bfloat16. `target` is the
    target's config."""
    config, tensors = learner.files(target, has_head)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    partial = path.with_suffix(".part")
    rounded = {
        name: tensor.detach().cpu().bfloat16() if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in tensors.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in rounded.items()}, str(partial))
    partial.replace(path)
    save_json(folder / "config.json", config)

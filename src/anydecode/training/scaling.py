"""A study of draft models: how the accepted length and the throughput grow (`scylla`).

Draft models of a grid of sizes and numbers of learned tokens are trained on the same answers of the
target (`DraftModelRun`) and measured; laws are fitted to the measurements. A study has a folder,
from which it is resumed: `answers.json`, a folder per draft model, and `results.json`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.files import read_json
from anydecode.training.block_adapter import Pair, open_llama
from anydecode.training.checkpoint import save_json
from anydecode.training.draft_model import (
    NUM_EVALUATED,
    DraftModelRun,
    DraftOptions,
    target_answers,
)
from anydecode.training.nested import first_layers
from anydecode.training.recipes.draft_recipe import DraftRecipe
from anydecode.training.recipes.scylla import ScalingRecipe
from anydecode.training.scaling_law import LogLinearLaw, fit_law

#: Each batch is timed so many times; the fastest counts.
NUM_TIMED = 2
#: Calls with the fraction of the study that is done, and what is done now.
Report = Callable[[float, str], None]


class ScalingStudy:
    """A study in a folder.

    Args:
        checkpoint: The target.
        folder: The study's folder: new, or that of an interrupted one.
        recipe: What is measured.
        options: How each draft model is trained; its steps, recipe and size are the study's.

    Attributes:
        points: A measurement of each draft model: its layers, their parameters, the tokens that it
            has learned, and the tokens per pass.
        speeds: Tokens per second by layers of the draft model, 0 for none, and batch.

    Raises:
        CheckpointError: See `DraftModelRun`.
        InvalidRequestError: The folder holds another study, or files of another form.
    """

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: ScalingRecipe, options: DraftOptions
    ) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.recipe, self.options = recipe, options
        self.points: list[dict[str, float]] = []
        self.speeds: list[dict[str, float]] = []
        grid = {name: value for name, value in asdict(recipe).items() if name != "planned"}
        training = {name: getattr(options, name) for name in _TRAINING}
        settings = {"model": checkpoint.name, **grid, **training}
        #: What the studies of a folder have in common, as JSON has it.
        self.settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        if self._results_file.is_file():
            stored = read_json(self._results_file)
            if stored.get("settings") != self.settings:
                raise InvalidRequestError(f"{folder} holds another study: give another folder")
            self.points = _numbers(self._results_file, stored.get("points"), _POINT)
            self.speeds = _numbers(self._results_file, stored.get("speeds"), _SPEED)

    @property
    def _results_file(self) -> Path:
        return self.folder / "results.json"

    def run(self, report: Report = lambda *_: None) -> None:
        """Train and measure what is missing. Raises `InvalidRequestError` if the target has fewer
        layers than a draft model."""
        recipe = self.recipe
        if len(self.points) < len(recipe.layers) * len(recipe.tokens):
            # Refused before the smaller ones are trained.
            first_layers(open_llama(self.checkpoint), recipe.layers[-1])
        grid = [(layers, tokens) for layers in recipe.layers for tokens in recipe.tokens]
        total, done = sum(tokens for _, tokens in grid), 0
        report(0.0, "answers")
        pairs = self._pairs()
        for number, (layers, tokens) in enumerate(grid):
            if number >= len(self.points):
                advance = partial(_advance, report, done, tokens, total, f"{layers} layers")
                self.points.append(self._trained(layers, tokens, pairs, advance))
                self._save()
            done += tokens
        for layers in (0, *recipe.layers)[len(self.speeds) // len(recipe.batches) :]:
            report(1.0, "throughput")
            self.speeds += self._timed(layers, pairs)
            self._save()

    def _pairs(self) -> list[Pair]:
        """The target's answers, which all draft models learn."""
        file = self.folder / "answers.json"
        if file.is_file():
            try:
                stored = read_json(file)["answers"]
                return [([*map(int, start)], [*map(int, end)]) for start, end in stored]
            except (KeyError, TypeError, ValueError):
                raise InvalidRequestError(f"{file} has no pairs of lists of tokens") from None
        pairs = target_answers(self.checkpoint, self.options)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_json(file, {"answers": pairs})
        return pairs

    def _run_folder(self, layers: int, tokens: int) -> Path:
        return self.folder / f"layers-{layers}-tokens-{tokens}"

    def _trained(
        self, layers: int, tokens: int, pairs: list[Pair], report: Callable[[float], None]
    ) -> dict[str, float]:
        """The measurement of a draft model that learns `tokens` tokens; calls `report` with the
        fraction of them."""
        mean = sum(len(answer) for _, answer in pairs) / len(pairs)
        run = DraftModelRun(
            self.checkpoint,
            self._run_folder(layers, tokens),
            replace(
                self.options,
                minutes=None,
                steps=math.ceil(tokens / (mean * self.options.batch)),
                draft=DraftRecipe("scylla", layers, objective="forward-kl"),
                size=self.recipe.size,
            ),
            pairs=pairs,
        )
        run.train(lambda done, _: report(done))
        measured = run.measure()["temperature 0.0"]
        return {
            "layers": layers,
            "parameters": sum(weight.numel() for weight in run.trained),
            "tokens": run.num_tokens,
            "accepted": measured["tokens_per_pass"],
        }

    def _timed(self, layers: int, pairs: list[Pair]) -> list[dict[str, float]]:
        """The throughput of each batch with the draft model that has learned the most tokens, or
        without one."""
        folder = self._run_folder(layers, self.recipe.tokens[-1]) / "draft"
        decoder = f"speculative-sampling:size={self.recipe.size}" if layers else "autoregressive"
        prompts = [prompt for prompt, _ in pairs[:NUM_EVALUATED]]
        speeds = []
        draft, threads = folder if layers else None, torch.get_num_threads()
        with LLM(self.checkpoint.path, draft=draft, threads=threads, drafting="fixed") as llm:
            options: dict[str, Any] = {
                "decoder": decoder,
                "temperature": 0.0,
                "max_tokens": self.options.tokens,
                "ignore_eos": True,
            }
            for batch in self.recipe.batches:
                chosen = [prompts[number % len(prompts)] for number in range(batch)]
                rate = max(self._rate(llm, chosen, options) for _ in range(NUM_TIMED))
                speeds.append(
                    {"layers": layers, "batch": batch, "tokens_per_second": round(rate, 2)}
                )
        return speeds

    def _rate(self, llm: LLM, prompts: list[list[int]], options: dict[str, Any]) -> float:
        """Tokens per second of one run of a batch."""
        start = time.perf_counter()
        answers = llm.generate(prompts, **options)
        return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - start)

    def laws(self) -> dict[str, LogLinearLaw]:
        """The law of the accepted length, and one of the throughput for each draft model."""
        found = {"accepted": fit_law(self.points, "accepted", ["tokens", "parameters"])}
        for layers in (0, *self.recipe.layers):
            rows = [speed for speed in self.speeds if speed["layers"] == layers]
            name = f"tokens_per_second, {layers} layers"
            found[name] = fit_law(rows, "tokens_per_second", ["batch"])
        return found

    def recommended(self) -> list[dict[str, float]]:
        """The draft model that promises the highest throughput for each batch: its layers, 0 for
        none, and the tokens per second and tokens per pass that are predicted."""
        law = self.laws()["accepted"]
        return recommend(self.points, self.speeds, law, self.recipe.planned, self.recipe.size)

    def results(self) -> dict[str, Any]:
        """Measurements, laws and recommendation as plain JSON."""
        return {
            **self._measured(),
            "laws": {name: law.to_dict() for name, law in self.laws().items()},
            "planned": self.recipe.planned,
            "recommended": self.recommended(),
        }

    def _measured(self) -> dict[str, Any]:
        return {"settings": self.settings, "points": self.points, "speeds": self.speeds}

    def _save(self) -> None:
        save_json(self._results_file, self._measured())


def recommend(
    points: list[dict[str, float]],
    speeds: list[dict[str, float]],
    law: LogLinearLaw,
    planned: float,
    size: int,
) -> list[dict[str, float]]:
    """See `ScalingStudy.recommended`.

    The time per pass is that of the measured draft model of the same size, so its throughput is
    multiplied by the predicted tokens per pass for `planned` learned tokens, of those that it has.
    A pass with `size` drafts has from 1 to `size` + 1 tokens, also where the law predicts others.
    """
    found = []
    for batch in dict.fromkeys(speed["batch"] for speed in speeds):
        candidates = []
        for speed in (one for one in speeds if one["batch"] == batch):
            accepted, promised = 1.0, speed["tokens_per_second"]
            if speed["layers"]:
                own = [point for point in points if point["layers"] == speed["layers"]]
                measured = max(own, key=lambda point: point["tokens"])
                accepted = min(max(1.0, law.predict({**measured, "tokens": planned})), size + 1.0)
                promised *= accepted / measured["accepted"]
            candidates.append(
                {
                    "batch": batch,
                    "layers": speed["layers"],
                    "tokens_per_second": round(promised, 2),
                    "accepted": round(accepted, 3),
                }
            )
        found.append(max(candidates, key=lambda one: one["tokens_per_second"]))
    return found


def _advance(report: Report, start: int, tokens: int, total: int, what: str, share: float) -> None:
    report((start + share * tokens) / total, what)


def _numbers(file: Path, rows: Any, names: Sequence[str]) -> list[dict[str, float]]:
    """Stored measurements. Raises `InvalidRequestError` if they are not lists of numbers."""
    if isinstance(rows, list) and all(
        isinstance(row, dict)
        and row.keys() == {*names}
        and all(type(value) in (int, float) and value >= 0 for value in row.values())
        for row in rows
    ):
        return rows
    raise InvalidRequestError(f"{file} has no measurements with {', '.join(names)}")


_POINT = ("layers", "parameters", "tokens", "accepted")
_SPEED = ("layers", "batch", "tokens_per_second")
#: Options of the training that a study's draft models share.
_TRAINING = ("answers", "tokens", "batch", "rate", "seed")

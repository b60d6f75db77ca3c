"""The predictors of SpecEE (arXiv:2504.08850), trained on what they read while the frozen model and
its draft model generate answers.

The exits that every token checks are those where the most tokens could have left first. Every layer
is checked here, so that what a predictor reads as the change is that since the layer before it;
later it is the change since the last layer that the token has checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anydecode.api.llm import LLM
from anydecode.decoders.depth.specee import CandidateGuide, PredictedExit, SpecEe
from anydecode.errors import InvalidRequestError
from anydecode.kernels.routes import RoutedPass
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.exit_predictors import (
    FILE_NAME,
    NUM_FEATURES,
    ExitPredictors,
    Predictor,
)
from anydecode.training.exit_run import HELD_OUT, ExitRecipe, ExitRows, ExitRun, Report


@dataclass(frozen=True)
class PredictorRecipe(ExitRecipe):
    """How predictors are trained.

    Attributes:
        always: How many exits every token checks.
    """

    width: int = 512
    threshold: float = 0.5
    always: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.always < 1:
            raise InvalidRequestError("always must be 1 or more")


class PredictorRun(ExitRun):
    """A run that trains a predictor for every layer but the last. See `ExitRun`; `llm` also has the
    draft model."""

    recipe: PredictorRecipe

    @property
    def path(self) -> Path:
        return self.folder / FILE_NAME

    def predictors(self) -> ExitPredictors:
        """The predictors as they are now."""
        found = {}
        for name, network in self.networks.items():
            down, down_bias, up, up_bias = (
                one.detach().numpy().copy() for one in network.parameters()
            )
            found[int(name)] = Predictor(down, down_bias, up[0], float(up_bias[0]))
        always = first_exits(self.rows.labels, self.recipe.always)
        return ExitPredictors(found, always, self.fingerprint)

    def _write(self) -> None:
        self.predictors().save(self.path)

    def _network(self, num_features: int) -> nn.Module:
        width = self.recipe.width
        return nn.Sequential(nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, 1))

    def _collect(self, llm: LLM, prompts: Seq[list[int]], report: Report) -> ExitRows:
        depth = llm.model.spec.num_layers
        if depth < 2:
            raise InvalidRequestError("a model of one layer has no exit before it")
        recorder, counts = _Recorder(llm), []
        for index, prompt in enumerate(prompts):
            report("answers", index / len(prompts))
            llm.generate(
                prompt,
                decoder=recorder,
                max_tokens=self.recipe.tokens,
                temperature=1.0,
                seed=self.recipe.seed + index,
            )
            counts.append(len(recorder.labels))
        if not counts[-1]:
            raise InvalidRequestError("the answers have no tokens to learn from")
        features = torch.tensor(np.array(recorder.features), dtype=torch.float32)
        labels = torch.tensor(np.array(recorder.labels))
        exits = range(1, depth)
        return ExitRows(
            {exit: features[:, exit - 1].contiguous() for exit in exits},
            {exit: labels[:, exit - 1].contiguous() for exit in exits},
            counts[max(1, int(HELD_OUT * len(prompts))) - 1],
        )


def first_exits(labels: dict[int, torch.Tensor], count: int) -> frozenset[int]:
    """The `count` exits where the most rows could leave first; `labels` as of `ExitRows`."""
    exits = sorted(labels)
    table = torch.stack([labels[exit] for exit in exits]).to(torch.int64)
    rows = table.any(0)
    firsts = Counter(table[:, rows].argmax(0).tolist())
    ordered = sorted(range(len(exits)), key=lambda index: (-firsts[index], index))
    return frozenset(exits[index] for index in ordered[:count])


class _Recorder(SpecEe):
    """Generates the text of plain decoding, and records what predictors would read.

    Attributes:
        features: `[depth - 1, NUM_FEATURES]` per token.
        labels: bool `[depth - 1]` per token: whether the last layer's most probable token is that
            of each other layer.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        network: Any = llm.model.network  # type: ignore[attr-defined]
        zeros = np.zeros((1, NUM_FEATURES), np.float32)
        silent = Predictor(zeros, zeros[0, :1], zeros[0, :1], 0.0)
        exits = range(1, llm.model.spec.num_layers)
        self._own = ExitPredictors(
            dict.fromkeys(exits, silent), frozenset(exits), model_fingerprint(network)
        )
        self.features: list[np.ndarray] = []
        self.labels: list[list[bool]] = []

    def route(self, model: Any, trained: ExitPredictors) -> PredictedExit:
        return _RecordedExit(model, trained, self)


class _RecordedExit(PredictedExit):
    def __init__(self, model: Any, predictors: ExitPredictors, recorder: _Recorder) -> None:
        super().__init__(model, predictors, threshold=1.0)
        self.recorder = recorder

    def run(self, routed: RoutedPass) -> None:
        guides: list[CandidateGuide] = routed.guides
        rows, depth = np.arange(len(guides)), routed.num_layers
        features, best = [], []
        for layer in range(depth):
            routed.run(rows, layer, layer + 1)
            best.append(routed.head(rows).argmax(-1))
            if layer < depth - 1:
                features.append([self.features(routed, row) for row in rows.tolist()])
        routed.stop(rows, depth)
        for row in rows.tolist():
            self.recorder.features.append(np.array([one[row] for one in features]))
            self.recorder.labels.append([bool(one[row] == best[-1][row]) for one in best[:-1]])

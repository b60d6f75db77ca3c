"""SpecEE: tokens leave the model where a small predictor, which looks at a draft's candidates
alone, says that the token is known (Xu et al., "SpecEE: Accelerating Large Language Model Inference
with Speculative Early Exiting", arXiv:2504.08850)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.trained_routes import TrainedRoutes
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.two_models import DRAFT
from anydecode.kernels.interface import Variant
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.exit_predictors import NUM_CANDIDATES, ExitPredictors
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence

#: Recent tokens whose exits are checked again, and layers beside them that are checked too.
NUM_RECENT, NEAR = 5, (-2, 0, 2)


@dataclass(eq=False)
class CandidateGuide(Guide):
    """What a route knows of a row.

    Attributes:
        candidates: Token ids, int64 `[NUM_CANDIDATES]`; empty: the row leaves nowhere.
        checked: The exits that the row checks.
        probabilities: Those of the candidates at the last check.
    """

    candidates: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    checked: frozenset[int] = frozenset()
    probabilities: np.ndarray | None = None


class PredictedExit(Route):
    """Rows leave at the first exit that they check whose predictor says so, if the most probable
    token there is a candidate. They store nothing in the layers behind it.

    Args:
        model: The model, for the head's rows of candidates.
        predictors: Its predictors.
        threshold: The probability above which the whole head is computed.
    """

    leaves_holes = True

    def __init__(self, model: Any, predictors: ExitPredictors, threshold: float) -> None:
        self.model, self.predictors, self.threshold = model, predictors, threshold

    def run(self, routed: RoutedPass) -> None:
        guides: list[CandidateGuide] = routed.guides
        active, layer, depth = np.arange(len(guides)), 0, routed.num_layers
        for exit in sorted(frozenset().union(*(guide.checked for guide in guides))):
            routed.run(active, layer, exit)
            routed.count(active, exit - layer, exit - layer)
            layer = exit
            leaves = np.array([self._leaves(routed, row, exit) for row in active.tolist()], bool)
            routed.stop(active[leaves], exit)
            active = active[~leaves]
        routed.run(active, layer, depth)
        routed.count(active, depth - layer, depth - layer)
        routed.stop(active, depth)

    def _leaves(self, routed: RoutedPass, row: int, exit: int) -> bool:
        guide = routed.guides[row]
        if exit not in guide.checked:
            return False
        if self.predictors.predictors[exit](self.features(routed, row)) <= self.threshold:
            return False
        logits = routed.head(np.array([row]))[0]
        return bool(logits.argmax() in guide.candidates)

    def features(self, routed: RoutedPass, row: int) -> np.ndarray:
        """What a predictor reads, float64 `[NUM_FEATURES]`: the candidates' logits, their softmax,
        and how that has changed since the row's last check."""
        guide: CandidateGuide = routed.guides[row]
        logits = self.model.logits_of(routed.states[row : row + 1], guide.candidates)[0]
        weights = np.exp(logits - logits.max())
        now, before = weights / weights.sum(), guide.probabilities
        guide.probabilities = now
        return np.concatenate([logits, now, now if before is None else now - before])


@register(
    Card(
        "specee",
        "depth",
        paper="Xu et al. 2025, SpecEE (arXiv:2504.08850)",
        exactness="lossy",
        summary="A draft model proposes four candidates, and each token leaves at the first layer"
        " where a predictor says that one of them has won.",
        needs=("draft model", "exit predictors"),
        works_with=("constraints", "samplers", "batches"),
        missing=("drafts as trees, whose paths leave the model together",),
        deviations=(
            "the layers that are always checked are those that the training finds, not the paper's"
            " for Llama-2-7B",
            "layers near recent exits are checked from an answer's second token on; the release"
            " waits for five tokens, and goes on with the exits of the answer before",
            "candidates are those of any draft model; the paper's is EAGLE's drafter",
            "samples above temperature 0 from the logits at the exit; the paper decodes greedily",
            "a drafter that reads the model's inner layers reads, behind an exit, the state there",
            "predictors of all depths read the twelve features of the paper's 32-layer models",
        ),
        remote={"threshold": Range(0, 1)},
    )
)
class SpecEe(TrainedRoutes):
    """Leaves the model where a predictor expects a candidate to be the most probable token.

    A draft model's four most probable tokens are a token's candidates. Behind the layers that it
    checks, a predictor reads the head's logits of these tokens alone. If its probability is above
    the threshold, the whole head is computed, and the token leaves if the most probable one is a
    candidate. Checked are some layers always, and those where one of the last five tokens has left,
    or two layers beside them. Later tokens do not see a token in the layers that it has not run.

    Args:
        threshold: See above.
        predictors: The file of `anydecode train predictors`; by default that of the model's folder,
            exit_predictors.safetensors.
    """

    requirements = Requirements(
        runners=(DRAFT,), reads_states=True, reads_exit_predictors=True, attention_only=("target",)
    )

    part, command, parameter = "exit_predictors", "predictors", "predictors"

    def __init__(self, threshold: float = 0.5, predictors: str | Path | None = None) -> None:
        super().__init__(None if predictors is None else ExitPredictors.load(Path(predictors)))
        self.threshold = threshold

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        route: PredictedExit = self.trained_route(sequence)
        return route

    def route(self, model: Any, trained: ExitPredictors) -> PredictedExit:
        return PredictedExit(model, trained, self.threshold)

    def decode(self, sequence: Sequence) -> Decoding:
        if sequence.draft_states:  # the drafter reads the state of every position
            sequence.truncate(0)
        yield from super().decode(sequence)

    def guides(
        self, sequence: Sequence, variant: Variant | None, tokens: list[int], past: list[Guide]
    ) -> Generator[DecoderAction, Any, list[Guide]]:
        if not isinstance(variant, PredictedExit):
            return []
        text = sequence.all_tokens[: sequence.kv_cache().length + len(tokens)]
        draft_cache = sequence.kv_cache(DRAFT)
        if DRAFT in sequence.draft_states:
            sequence.draft_states[DRAFT].align(draft_cache)
        draft_cache.truncate(min(draft_cache.length, len(text) - 1))
        scores = yield sequence.score(text[draft_cache.length :], runner=DRAFT)
        logits = fit_vocab(sequence, scores.row(0))
        candidates = np.argsort(-logits, kind="stable")[:NUM_CANDIDATES]
        predictors = variant.predictors
        recent = [guide.num_layers for guide in past[-NUM_RECENT:]]
        near = {exit + distance for exit in recent for distance in NEAR}
        checked = predictors.always | (near & predictors.predictors.keys())
        return [CandidateGuide(candidates=candidates, checked=frozenset(checked))]

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
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Variant
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.exit_predictors import NUM_CANDIDATES, ExitPredictors
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import ROOT, TokenTree

#: Recent tokens whose exits are checked again, and layers beside them that are checked too.
NUM_RECENT, NEAR = 5, (-2, 0, 2)


_EXITS: StateKey[list[int]] = StateKey("specee", "layers of each scored token")


@dataclass(eq=False)
class CandidateGuide(Guide):
    """What a route knows of a row.

    Attributes:
        candidates: Token ids, int64 `[NUM_CANDIDATES]`; empty: the row leaves nowhere.
        checked: The exits that the row checks.
        parent: In a tree, the row before this one, which is in the same pass; else None.
        is_replayed: Whether the row leaves at its first check, where it has left before a restart.
        probabilities: Those of the candidates at the last check.
    """

    candidates: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    checked: frozenset[int] = frozenset()
    parent: CandidateGuide | None = None
    is_replayed: bool = False
    probabilities: np.ndarray | None = None


class PredictedExit(Route):
    """Rows leave at the first exit that they check whose predictor says so, if the most probable
    token there is a candidate. They store nothing in the layers behind it.

    The rows of a path of a tree, from its root to a leaf, leave together: at the first exit where
    all of them may. A row of several paths runs until the last of them has left. So whatever a row
    attends to has run at least as many layers.

    Args:
        model: The model, for the head's rows of candidates.
        predictors: Its predictors.
        threshold: The probability above which the whole head is computed.
    """

    leaves_holes = True

    def __init__(self, model: Any, predictors: ExitPredictors, threshold: float) -> None:
        self.model, self.predictors, self.threshold = model, predictors, threshold

    def run(self, routed: RoutedPass) -> None:
        paths, layer, depth = paths_of(routed.guides), 0, routed.num_layers
        active = _rows_of(paths)
        for exit in sorted(frozenset().union(*(guide.checked for guide in routed.guides))):
            routed.run(active, layer, exit)
            routed.count(active, exit - layer, exit - layer)
            layer = exit
            likely = {row for row in active.tolist() if self._is_likely(routed, row, exit)}
            leaving = [path for path in paths if likely.issuperset(path)]
            known = {row for row in _rows_of(leaving).tolist() if self._is_candidate(routed, row)}
            paths = [path for path in paths if not known.issuperset(path)]
            remaining = _rows_of(paths)
            routed.stop(np.setdiff1d(active, remaining), exit)
            active = remaining
        routed.run(active, layer, depth)
        routed.count(active, depth - layer, depth - layer)
        routed.stop(active, depth)

    def _is_likely(self, routed: RoutedPass, row: int, exit: int) -> bool:
        """Whether the predictor of `exit` expects a candidate."""
        guide: CandidateGuide = routed.guides[row]
        if exit not in guide.checked or guide.is_replayed:
            return exit in guide.checked
        return self.predictors.predictors[exit](self.features(routed, row)) > self.threshold

    def _is_candidate(self, routed: RoutedPass, row: int) -> bool:
        """Whether the most probable token of the whole head is a candidate."""
        guide: CandidateGuide = routed.guides[row]
        if guide.is_replayed:
            return True
        return bool(routed.head(np.array([row]))[0].argmax() in guide.candidates)

    @property
    def exits(self) -> frozenset[int]:
        """The exits that have a predictor."""
        return frozenset(self.predictors.predictors)

    def checked(self, past: list[int]) -> frozenset[int]:
        """The exits that a token checks, from the layers that each token before it has run."""
        near = {exit + distance for exit in past[-NUM_RECENT:] for distance in NEAR}
        return self.predictors.always | (near & self.exits)

    def features(self, routed: RoutedPass, row: int) -> np.ndarray:
        """What a predictor reads, float64 `[NUM_FEATURES]`: the candidates' logits, their softmax,
        and how that has changed since the row's last check."""
        guide: CandidateGuide = routed.guides[row]
        logits = self.model.logits_of(routed.states[row : row + 1], guide.candidates)[0]
        weights = np.exp(logits - logits.max())
        now, before = weights / weights.sum(), guide.probabilities
        guide.probabilities = now
        return np.concatenate([logits, now, now if before is None else now - before])


class CandidateTree(GrowingTree):
    """A draft tree that also has the candidates of each scored node.

    Attributes:
        most_probable: By node, int64 `[NUM_CANDIDATES]`.
    """

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence)
        self.most_probable: dict[int, np.ndarray] = {}

    def store_candidates(self, node: int, row: np.ndarray) -> None:
        super().store_candidates(node, row)
        self.most_probable[node] = most_probable(self.sequence, row)


def most_probable(sequence: Sequence, row: np.ndarray) -> np.ndarray:
    """The candidates of a token, int64 `[NUM_CANDIDATES]`, from the draft model's logits, float32
    `[vocab_size]`."""
    return np.argsort(-fit_vocab(sequence, row), kind="stable")[:NUM_CANDIDATES]


def paths_of(guides: list[CandidateGuide]) -> list[list[int]]:
    """The rows of each path, from a leaf to its root; a row without a tree is a path."""
    number = {id(guide): row for row, guide in enumerate(guides)}
    inner = {id(guide.parent) for guide in guides if guide.parent is not None}
    paths: list[list[int]] = []
    for guide in guides:
        above: CandidateGuide | None = guide
        if id(guide) not in inner:
            paths.append([])
            while above is not None:
                paths[-1].append(number[id(above)])
                above = above.parent
    return paths


def _rows_of(paths: list[list[int]]) -> np.ndarray:
    return np.array(sorted({row for path in paths for row in path}), np.int64)


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
        measured=(
            "0.50 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 87.0% of"
            " tokens as the full model: 26.6 of 30 layers run, 1.66 rows of the head, and a draft"
            " model (AMD EPYC, 2 cores; `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "the layers that are always checked are those that the training finds, not the paper's"
            " for Llama-2-7B",
            "layers near recent exits are checked from an answer's second token on; the release"
            " waits for five tokens, and goes on with the exits of the answer before",
            "candidates are those of any draft model; the paper's is EAGLE's drafter",
            "the rules of draft trees are not in the release: a path leaves where each of its"
            " tokens may, by its own predictor and the head; the tree is EAGLE-2's",
            "samples above temperature 0 from the logits at the exit; the paper decodes greedily",
            "a drafter that reads the model's inner layers reads, behind an exit, the state there",
            "predictors of all depths read the twelve features of the paper's 32-layer models",
        ),
        bounds={"size": Range(0, 256)},
        remote={
            "threshold": Range(0, 1),
            "size": Range(0, 64),
            "depth": Range(1, 32),
            "width": Range(1, 16),
        },
    )
)
class SpecEe(TrainedRoutes):
    """Leaves the model where a predictor expects a candidate to be the most probable token.

    A draft model's four most probable tokens are a token's candidates. Behind the layers that it
    checks, a predictor reads the head's logits of these tokens alone. If its probability is above
    the threshold, the whole head is computed, and the token leaves if the most probable one is a
    candidate. Checked are some layers always, and those where one of the last five tokens has left,
    or two layers beside them. Later tokens do not see a token in the layers that it has not run.

    With `size`, each pass verifies a draft tree too, and the tokens of a path of the tree leave
    together, where all of them may. The tokens that the tree's rows sample are taken as far as they
    are drafts. The trace has the sublayers of all rows of the pass, and `exits`, the layers that
    each row kept has run.

    Args:
        threshold: See above.
        size: Number of nodes of a draft tree; 0: no tree.
        depth: Number of levels of the tree, one pass of the draft model each.
        width: Number of nodes that each level expands, and of children of each of them.
        predictors: The file of `anydecode train depth --recipe specee`; by default that of the
            model's folder, exit_predictors.safetensors.
    """

    requirements = Requirements(
        runners=(DRAFT,), reads_states=True, reads_exit_predictors=True, attention_only=("target",)
    )

    part, command = "exit_predictors", "depth --recipe specee"
    parameter = "predictors"

    def __init__(
        self,
        threshold: float = 0.5,
        size: int = 0,
        depth: int = 4,
        width: int = 4,
        predictors: str | Path | None = None,
    ) -> None:
        if size < 0 or depth < 1 or width < 1:
            raise InvalidRequestError("specee needs size >= 0, depth >= 1 and width >= 1")
        super().__init__(None if predictors is None else ExitPredictors.load(Path(predictors)))
        self.threshold = threshold
        self.size, self.depth, self.width = size, depth, width

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        route: PredictedExit = self.trained_route(sequence)
        return route

    def route(self, model: Any, trained: ExitPredictors) -> PredictedExit:
        return PredictedExit(model, trained, self.threshold)

    def decode(self, sequence: Sequence) -> Decoding:
        if sequence.draft_states:  # the drafter reads the state of every position
            sequence.truncate(0)
        yield from self._decode_trees(sequence) if self.size else super().decode(sequence)

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
        checked = variant.checked([guide.num_layers for guide in past])
        candidates = most_probable(sequence, scores.row(0))
        return [CandidateGuide(candidates=candidates, checked=checked)]

    def _decode_trees(self, sequence: Sequence) -> Decoding:
        num_prompt, kv_cache = len(sequence.prompt), sequence.kv_cache()
        route: PredictedExit = self.trained_route(sequence)
        if kv_cache.length > num_prompt:  # another request's, through all layers
            sequence.truncate(num_prompt)
        exits = sequence.state.setdefault(_EXITS, [])
        while not sequence.finished:
            tokens, num_scored = sequence.unscored(), kv_cache.length - num_prompt
            if num_scored < 0:
                scores = yield sequence.score(tokens[:-num_scored])
                if not sequence.tokens:
                    first = scores.sampled[-1]
                    num_layers = sequence.num_layers
                    sequence.record(
                        TokenTree(), [], [first], mixers=num_layers, mlps=num_layers, heads=0
                    )
                    sequence.emit([first])
            elif len(tokens) > 1:  # again after a restart, through the layers of the first time
                checked = frozenset(exits[num_scored : num_scored + 1]) & route.exits
                guide = CandidateGuide(checked=checked, is_replayed=True)
                yield sequence.score(tokens[:1], variant=route, guides=[guide])
            else:
                yield from self._decode_tree(sequence, route, exits)

    def _decode_tree(
        self, sequence: Sequence, route: PredictedExit, exits: list[int]
    ) -> Generator[DecoderAction, Any, None]:
        """Draft a tree, verify it and emit tokens; adds the layers of the scored ones to
        `exits`."""
        growing = CandidateTree(sequence)
        yield from growing.start()
        nodes = list[int]()
        size = min(self.size, sequence.remaining - 1)
        if size:
            nodes = yield from growing.grow_best(size, self.depth, self.width)
            yield from growing.expand([one for one in nodes if one not in growing.candidates])
        tree = growing.pruned(nodes, "point", has_probabilities=False)
        checked, guides = route.checked(exits), list[CandidateGuide]()
        for number, node in enumerate((ROOT, *nodes)):
            # The last token of the text is the first node; a row's number is one more than its
            # node's.
            parent = guides[tree.parents[number - 1] + 1] if number else None
            candidates = growing.most_probable[node]
            guides.append(CandidateGuide(candidates=candidates, checked=checked, parent=parent))
        request = sequence.extend(
            [sequence.all_tokens[-1], *tree.tokens],
            [ROOT, *(parent + 1 for parent in tree.parents)],
            runner=TARGET,
        )
        span = request.groups[0][-1]
        span.variant, span.guides = route, list(guides)
        scores = yield request
        result = TokenExact().walk(tree, scores)
        rows = [scores.after(node) for node in (ROOT, *result.path)]
        kept = [guides[row].num_layers for row in rows]
        sequence.record(
            tree,
            result.path,
            result.tokens,
            mixers=sum(guide.num_mixers for guide in guides),
            mlps=sum(guide.num_mlps for guide in guides),
            heads=sum(guide.num_heads for guide in guides),
            exits=kept,
        )
        exits += kept
        sequence.retain(rows)
        growing.retain(result.tokens[:-1])
        sampler = scores.sampler_after(rows[-1]) if sequence.sampler.is_stateful else None
        sequence.emit(result.tokens, sampler)

"""Path planning (Peng et al., "Path Planning for Masked Diffusion Model Sampling",
arXiv:2502.03540): in every step, all positions of the canvas are ranked again, and the worst-ranked
ones are masked, whether they held a token or not.

The planner that ranks tokens is the diffusion model itself, or a bidirectional model of its own,
which reads the canvas with all samples in place.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, best_first, ranking
from anydecode.decoders.diffusion.revising import STATEFUL, RevisedBlocks, RevisingDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.decoders.framework.canvas_spans import (
    canvas_span,
    score_canvas,
    visible_positions,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding, ScoreRequest, Scores
from anydecode.scoring.sequence import DRAFT, Sequence

PLANNERS = ("self", "draft")


class PathPlanning(RevisingDenoiser):
    """Step k of S masks the worst-ranked share 1 - (k + 1) / S of the block, rounded down. Other
    masks take their sampled tokens; other tokens stay."""

    steps: int | None = None
    eta = 1.0
    has_planner = False

    def use_planner(self) -> None:
        """Rank tokens by the draft model."""
        self.has_planner = True
        self.requirements = replace(self.requirements, runners=(DRAFT,), draft_causal=False)

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if not self.has_planner:
            return
        sizes = [sequence.model(runner).spec.vocab_size for runner in ("target", DRAFT)]
        if sizes[0] != sizes[1]:
            raise InvalidRequestError(
                f"a planner needs the vocabulary of the model: it has {sizes[1]} tokens, the model"
                f" {sizes[0]}"
            )

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        if not self.has_planner or sequence.sampler.is_stateful:
            yield from super().step(sequence, canvas)
            return
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        [predictions] = yield from self.forward(sequence, canvas, region=block)
        predictions.keep()
        positions = np.arange(*block)
        held = positions[canvas.committed[positions] >= 0]
        planned = {}
        if len(held):
            planned = yield from self._planned(sequence, canvas, predictions, block, held)
        self.open(canvas, block)
        self.revise(sequence, canvas, predictions, planned)

    def revise(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        planned: dict[int, float] | None = None,
    ) -> None:
        """Mask and unmask. `planned` are the ranks of tokens by the planner, by position."""
        positions = self.free_positions(canvas)
        steps = self.steps or canvas.block_masks
        num_masked = len(positions) * max(0, steps - canvas.block_step - 1) // steps
        was_masked = canvas.committed[positions] == MASKED
        ranks = self.ranking.rank(canvas, predictions, positions)
        if planned is not None or self.eta != 1:
            ranks = self._weighted(ranks, positions, was_masked, planned or {})
        order = best_first(ranks)
        is_masked = np.zeros(len(positions), bool)
        is_masked[order[len(positions) - num_masked :]] = True
        self.finish_revision(
            sequence,
            canvas,
            predictions,
            positions[was_masked & ~is_masked],
            positions[is_masked & ~was_masked],
            is_settled=canvas.block_step + 1 >= steps,
        )

    def _weighted(
        self,
        ranks: np.ndarray,
        positions: np.ndarray,
        was_masked: np.ndarray,
        planned: dict[int, float],
    ) -> np.ndarray:
        """The ranks as numbers up to 0 (of probabilities the logarithm), those of tokens by the
        planner, times `eta`."""
        if (ranks > 0).any():
            ranks = np.log(np.maximum(ranks, np.finfo(np.float64).tiny))
        of_tokens = [planned.get(int(i), rank) for i, rank in zip(positions, ranks, strict=True)]
        weighted: np.ndarray = np.where(was_masked, ranks, self.eta * np.array(of_tokens))
        return weighted

    def _planned(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        block: tuple[int, int],
        held: np.ndarray,
    ) -> Generator[ScoreRequest, Scores, dict[int, float]]:
        """The planner's log-probability of the token sampled at each of the positions `held`, given
        the canvas with all samples of the block in place."""
        kv_cache = sequence.kv_cache(DRAFT)
        kv_cache.truncate(0)
        spec = kv_cache.pool.model.spec
        free = np.arange(*block)
        free = free[canvas.committed[free] >= MASKED]
        tokens = canvas.copy_tokens(free, predictions.tokens(free))
        rows = np.arange(len(canvas), dtype=np.int32)
        visible = visible_positions(rows, len(canvas), spec.block_size)
        span = canvas_span(kv_cache, rows, tokens, visible)
        scores = yield score_canvas(sequence, DRAFT, [span], 1, held, spec.logit_shift)
        planned = {}
        for position, row in zip(held.tolist(), scores.logits, strict=True):
            logits = row.astype(np.float64)
            logits[canvas.mask] = -np.inf
            top = logits.max()
            planned[position] = float(
                logits[tokens[position]] - top - np.log(np.exp(logits - top).sum())
            )
        return planned


@register(
    Card(
        "p2",
        "diffusion",
        paper="Path Planning for Masked Diffusion Model Sampling (arXiv:2502.03540)",
        exactness="lossy",
        summary="Ranks all positions in every step, and masks the worst of them again.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "ranks of tokens are those of the tokens that the model would sample in their place, as"
            " in the released code and Open-dLLM",
            "a planner sees the prompt as it is; in the released code, with samples in its place",
            STATEFUL,
            "the mask token is never generated",
        ),
        remote={
            "steps": Range(1, 4096),
            "block": Range(0, 4096),
            "remasking": RANKING_WORDS,
            "eta": Range(0, 100),
            "planner": Words(PLANNERS),
            "cache": REVISING_WORDS,
        },
    )
)
def p2(
    steps: int | None = None,
    block: int = 0,
    remasking: str = "confidence",
    eta: float = 1.0,
    planner: str = "self",
    cache: str = "none",
    mask: int | None = None,
) -> PathPlanning:
    """Denoises with a plan that may take tokens back.

    Args:
        steps: Denoising steps per block (default: one per mask).
        block: Positions per block (0: the model's blocks, or the whole canvas).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        eta: The weight of the ranks of tokens, which are negative (logarithms of probabilities):
            the larger, the more tokens are masked again; 0: none.
        planner: "self", or "draft": tokens are ranked by the confidence of the draft model, which
            must be bidirectional and have the model's vocabulary.
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    check_steps(steps)
    if not 0 <= eta < np.inf:
        raise InvalidRequestError(f"eta must be 0 or more, not {eta}")
    if planner not in PLANNERS:
        raise InvalidRequestError(f"planner must be one of {', '.join(PLANNERS)}, not {planner!r}")
    if planner != "self" and remasking != "confidence":
        raise InvalidRequestError(
            f"a planner ranks by confidence; remasking={remasking!r} needs planner=self"
        )
    policy = cache_named(cache, REVISING_CACHES)
    decoder = PathPlanning(RevisedBlocks(block), ranking(remasking), cache=policy, mask=mask)
    decoder.steps, decoder.eta = steps, eta
    if planner == "draft":
        decoder.use_planner()
    return decoder

"""Explore-then-exploit ("From Bits to Rounds: Parallel Decoding with Exploration for Diffusion
Language Models", arXiv:2511.21103).

If few masks are confident, several tokens are tried for the most uncertain mask. The
candidate that makes the most other masks confident is committed, together with these masks.
"""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import EXACT_CACHES, EXACT_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class LookaheadBlocks(FixedBlocks):
    """The block of the first mask and the next `ahead` blocks, chosen again in every pass."""

    def __init__(self, size: int | None, ahead: int) -> None:
        super().__init__(size)
        if ahead < 0:
            raise InvalidRequestError(f"ahead must be at least 0, not {ahead}")
        self.ahead = ahead

    def current_block_end(self, canvas: Canvas) -> int:
        """The end of the block of the first mask."""
        return super().window_end(canvas)

    def window_end(self, canvas: Canvas) -> int:
        size = canvas.block_size or self.size or 32
        return min(self.current_block_end(canvas) + self.ahead * size, len(canvas))

    def should_close(self, canvas: Canvas) -> bool:
        return True


class ExploringDenoiser(Denoiser):
    """Commits all confident masks of the predicted blocks; explores if these are too few."""

    blocks: LookaheadBlocks
    threshold = 0.9
    candidates = 3
    enough = 2
    reward = 1.0

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        positions = np.array([position for position in canvas.masks if position in predictions])
        confident = positions[predictions.confidence(positions) >= self.threshold]
        current = canvas.masked(canvas.frontier, self.blocks.current_block_end(canvas))
        if (
            len(confident) >= self.enough
            or sequence.sampler.is_stateful
            or len(confident) == len(positions)
        ):
            self._open(canvas)
            if not len(confident):
                confident = current[[int(np.argmax(predictions.confidence(current)))]]
            self.commit(sequence, canvas, predictions, confident)
            return
        uncertain = np.setdiff1d(current, confident)
        if not len(uncertain):
            uncertain = np.setdiff1d(positions, confident)
        pivot = int(uncertain[int(np.argmax(predictions.entropies(uncertain)))])
        candidates = self._candidate_tokens(predictions, pivot)
        predictions.keep()
        tokens = predictions.tokens(confident)
        outcomes = yield from self.forward(
            sequence,
            canvas,
            [canvas.copy_tokens([*confident, pivot], [*tokens, token]) for token, _ in candidates],
            (canvas.frontier, int(positions[-1]) + 1),
        )
        others = np.setdiff1d(positions, [*confident, pivot])
        cascades = [others[one.confidence(others) >= self.threshold] for one in outcomes]
        values = [
            math.log(probability) + self.reward * len(cascade)
            for (_, probability), cascade in zip(candidates, cascades, strict=True)
        ]
        chosen = int(np.argmax(values))
        self._open(canvas)
        canvas.commit(confident, tokens, predictions.confidence(confident))
        canvas.commit([pivot], [candidates[chosen][0]], [candidates[chosen][1]])
        cascade = cascades[chosen]
        outcome = outcomes[chosen]
        canvas.commit(cascade, outcome.tokens(cascade), outcome.confidence(cascade))
        if sequence.compute_logprobs is not None:
            sources = [(predictions, position) for position in (*confident, pivot)]
            for source, position in [*sources, *((outcome, position) for position in cascade)]:
                token = int(canvas.tokens[position])
                canvas.logprobs[int(position)] = sequence.compute_logprobs(
                    source.logits(position), token, source.sampler
                )
        self.finish_step(
            sequence, canvas, predictions, sorted([*confident, pivot, *cascade]), pivot=pivot
        )

    def _candidate_tokens(self, predictions: Predictions, pivot: int) -> list[tuple[int, float]]:
        """The likeliest tokens of the pivot, with their probabilities.

        An end of text is included only if it is the likeliest, as it makes all later masks
        confident.
        """
        p = predictions.probabilities(pivot)
        order = np.argsort(-p, kind="stable")[: self.candidates + 1].tolist()
        allowed = [
            token
            for rank, token in enumerate(order)
            if p[token] > 0 and (rank == 0 or not predictions.sequence.stops_at(token))
        ]
        return [(token, float(p[token])) for token in allowed[: self.candidates]]

    def _open(self, canvas: Canvas) -> None:
        canvas.open(canvas.frontier, self.blocks.window_end(canvas))


@register(
    Card(
        "ete",
        "diffusion",
        paper="From Bits to Rounds (arXiv:2511.21103)",
        exactness="lossy",
        summary="Tries tokens for an uncertain mask; keeps the one that makes most others sure.",
        needs=("diffusion model",),
        works_with=("batches", "constraints", "streaming", "infilling"),
        deviations=(
            "no code was published: which mask is explored (that of the highest entropy in the"
            " current block) and how candidates are scored (log p + reward * number of masks that"
            " become confident) are our choice",
            "with stateful samplers (constraints, penalties), nothing is explored",
            "explored tokens are the likeliest ones at every temperature",
        ),
        remote={
            "threshold": Range(0, 1),
            "candidates": Range(1, 16),
            "min_confident": Range(1, 4096),
            "reward": Range(0, 100),
            "ahead": Range(0, 16),
            "block": Range(0, 4096),
            "cache": EXACT_WORDS,
        },
    )
)
def ete(
    threshold: float = 0.9,
    candidates: int = 3,
    min_confident: int = 2,
    reward: float = 1.0,
    ahead: int = 1,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises several blocks at once, and explores one mask if too few are confident.

    Args:
        threshold: Masks with at least this confidence are unmasked.
        candidates: How many tokens of the explored mask are tried, in a second pass.
        min_confident: With at least this many confident masks, nothing is explored.
        reward: The value of each mask that a candidate makes confident.
        ahead: How many blocks after the current one are predicted.
        block: Positions per block (default: up to 32).
        cache: "none", or "block" with a model that has blocks.
        mask: The mask token (default: the tokenizer's).
    """
    if candidates < 1 or min_confident < 1:
        raise InvalidRequestError(
            f"ete needs at least one candidate and min_confident >= 1, not candidates={candidates},"
            f" min_confident={min_confident}"
        )
    decoder = ExploringDenoiser(
        LookaheadBlocks(block, ahead), cache=cache_named(cache, EXACT_CACHES), mask=mask
    )
    decoder.threshold, decoder.candidates, decoder.enough, decoder.reward = (
        threshold,
        candidates,
        min_confident,
        reward,
    )
    return decoder

"""Explore, then exploit: when few masks are sure, the most uncertain one is tried out with several
tokens, and the one that makes most others sure is kept ("From Bits to Rounds: Parallel Decoding
with Exploration for Diffusion Language Models", arXiv:2511.21103)."""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class AcrossBlocks(FixedBlocks):
    """The block at the first mask and `ahead` further ones, chosen anew in every pass."""

    def __init__(self, size: int | None, ahead: int) -> None:
        super().__init__(size)
        if ahead < 0:
            raise InvalidRequestError("the number of blocks looked ahead cannot be negative")
        self.ahead = ahead

    def current(self, canvas: Canvas) -> int:
        """The end of the block at the first mask."""
        return super().window(canvas)

    def window(self, canvas: Canvas) -> int:
        size = canvas.size or self.size or 32
        return min(self.current(canvas) + self.ahead * size, len(canvas))

    def closes(self, canvas: Canvas) -> bool:
        return True


class ExploringDenoiser(Denoiser):
    """Commits what is sure in all blocks in view; where that is too little, explores."""

    blocks: AcrossBlocks
    threshold = 0.9
    candidates = 3
    enough = 2
    reward = 1.0

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        positions = np.array([position for position in canvas.masks if position in predictions])
        sure = positions[predictions.confidence(positions) >= self.threshold]
        current = canvas.masked(canvas.frontier, self.blocks.current(canvas))
        if len(sure) >= self.enough or sequence.sampler.stateful or len(sure) == len(positions):
            self._open(canvas)
            if not len(sure):
                sure = current[[int(np.argmax(predictions.confidence(current)))]]
            self.commit(sequence, canvas, predictions, sure)
            return
        open_ = np.setdiff1d(current, sure)
        if not len(open_):
            open_ = np.setdiff1d(positions, sure)
        pivot = int(open_[int(np.argmax(predictions.entropies(open_)))])
        tried = self._tried(predictions, pivot)
        predictions.keep()
        tokens = predictions.tokens(sure)
        trials = yield from self.forward(
            sequence,
            canvas,
            [canvas.copy_tokens([*sure, pivot], [*tokens, token]) for token, _ in tried],
            (canvas.frontier, int(positions[-1]) + 1),
        )
        left = np.setdiff1d(positions, [*sure, pivot])
        cascades = [left[one.confidence(left) >= self.threshold] for one in trials]
        values = [
            math.log(chance) + self.reward * len(cascade)
            for (_, chance), cascade in zip(tried, cascades, strict=True)
        ]
        chosen = int(np.argmax(values))
        self._open(canvas)
        canvas.commit(sure, tokens, predictions.confidence(sure))
        canvas.commit([pivot], [tried[chosen][0]], [tried[chosen][1]])
        cascade = cascades[chosen]
        after = trials[chosen]
        canvas.commit(cascade, after.tokens(cascade), after.confidence(cascade))
        if sequence.annotate is not None:
            written = [(predictions, position) for position in (*sure, pivot)]
            for one, position in [*written, *((after, position) for position in cascade)]:
                token = int(canvas.tokens[position])
                canvas.notes[int(position)] = sequence.annotate(
                    one.logits(position), token, one.sampler
                )
        self.settle(sequence, canvas, predictions, sorted([*sure, pivot, *cascade]), pivot=pivot)

    def _tried(self, predictions: Predictions, pivot: int) -> list[tuple[int, float]]:
        """The likeliest tokens of the pivot with their probabilities; an end of text only if it is
        the likeliest of all, as it makes everything behind it sure."""
        p = predictions.probabilities(pivot)
        order = np.argsort(-p, kind="stable")[: self.candidates + 1].tolist()
        allowed = [
            token
            for rank, token in enumerate(order)
            if p[token] > 0 and (rank == 0 or not predictions.sequence.stops_at(token))
        ]
        return [(token, float(p[token])) for token in allowed[: self.candidates]]

    def _open(self, canvas: Canvas) -> None:
        canvas.open(canvas.frontier, self.blocks.window(canvas))


@register(
    Card(
        "ete",
        "diffusion",
        paper="From Bits to Rounds (arXiv:2511.21103)",
        exactness="lossy",
        summary="Tries several tokens for an uncertain mask and keeps the one that settles most.",
        needs=("diffusion model",),
        works_with=("batches", "constraints", "streaming", "infilling"),
        deviations=(
            "no code was published: which mask is explored (the one of most entropy in the current"
            " block) and how candidates are valued (log p + reward x masks made sure) are ours",
            "where the policy depends on the text before (constraints, penalties) it only exploits",
            "explored tokens are the likeliest ones at every temperature",
        ),
    )
)
def ete(
    threshold: float = 0.9,
    candidates: int = 3,
    enough: int = 2,
    reward: float = 1.0,
    ahead: int = 1,
    block: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """Commits confidences of `threshold` in the current block and `ahead` further ones. Fewer than
    `enough`: the `candidates` likeliest tokens of one mask are tried in a second pass."""
    if candidates < 1 or enough < 1:
        raise InvalidRequestError("ete needs at least one candidate, and one token to be enough")
    made = ExploringDenoiser(AcrossBlocks(block, ahead), mask=mask)
    made.threshold, made.candidates, made.enough, made.reward = (
        threshold,
        candidates,
        enough,
        reward,
    )
    return made

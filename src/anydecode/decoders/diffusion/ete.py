"""Explore, then exploit: when few masks are sure, the most uncertain one is tried out with several
tokens, and the one that makes most others sure is kept ("From Bits to Rounds: Parallel Decoding
with Exploration for Diffusion Language Models", arXiv:2511.21103)."""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import Fixed
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class AcrossBlocks(Fixed):
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
        [look] = yield from self.look(sequence, canvas)
        places = np.array([place for place in canvas.masks if place in look])
        sure = places[look.confidence(places) >= self.threshold]
        current = canvas.masked(canvas.frontier, self.blocks.current(canvas))
        if len(sure) >= self.enough or sequence.policy.stateful or len(sure) == len(places):
            self._open(canvas)
            if not len(sure):
                sure = current[[int(np.argmax(look.confidence(current)))]]
            self.commit(sequence, canvas, look, sure)
            return
        open_ = np.setdiff1d(current, sure)
        if not len(open_):
            open_ = np.setdiff1d(places, sure)
        pivot = int(open_[int(np.argmax(look.entropies(open_)))])
        tried = self._tried(look, pivot)
        look.keep()
        tokens = look.tokens(sure)
        looks = yield from self.look(
            sequence,
            canvas,
            [canvas.copy_tokens([*sure, pivot], [*tokens, token]) for token, _ in tried],
            (canvas.frontier, int(places[-1]) + 1),
        )
        left = np.setdiff1d(places, [*sure, pivot])
        cascades = [left[one.confidence(left) >= self.threshold] for one in looks]
        values = [
            math.log(chance) + self.reward * len(cascade)
            for (_, chance), cascade in zip(tried, cascades, strict=True)
        ]
        chosen = int(np.argmax(values))
        self._open(canvas)
        canvas.commit(sure, tokens, look.confidence(sure))
        canvas.commit([pivot], [tried[chosen][0]], [tried[chosen][1]])
        cascade = cascades[chosen]
        after = looks[chosen]
        canvas.commit(cascade, after.tokens(cascade), after.confidence(cascade))
        if sequence.annotate is not None:
            written = [(look, place) for place in (*sure, pivot)]
            for one, place in [*written, *((after, place) for place in cascade)]:
                token = int(canvas.tokens[place])
                canvas.notes[int(place)] = sequence.annotate(one.logits(place), token, one.policy)
        self.settle(sequence, canvas, look, sorted([*sure, pivot, *cascade]), pivot=pivot)

    def _tried(self, look: Predictions, pivot: int) -> list[tuple[int, float]]:
        """The likeliest tokens of the pivot with their probabilities; an end of text only if it is
        the likeliest of all, as it makes everything behind it sure."""
        p = look.probabilities(pivot)
        order = np.argsort(-p, kind="stable")[: self.candidates + 1].tolist()
        allowed = [
            token
            for rank, token in enumerate(order)
            if p[token] > 0 and (rank == 0 or not look.sequence.stops_at(token))
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

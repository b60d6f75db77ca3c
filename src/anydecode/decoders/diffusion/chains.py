"""Several steps of one-token-a-pass denoising verified in one pass: the canvas after each of them
is guessed from the last predictions, all guesses are looked at together, and as many are kept as
the slow decoder would have reached. The text is that of the slow decoder, at every temperature."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import CachePolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking, best_first
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class ChainDenoiser(Denoiser):
    """Guesses up to `drafts` steps ahead: draft k is the canvas with the k best masks filled, and
    it stands if the step from draft k - 1, with that canvas's own predictions, leads to it."""

    def __init__(
        self,
        drafts: int,
        blocks: BlockPolicy,
        ranking: Ranking,
        cache: CachePolicy,
        mask: int | None = None,
    ) -> None:
        if drafts < 1:
            raise InvalidRequestError("there must be at least one draft")
        super().__init__(blocks, ranking, cache=cache, mask=mask)
        self.drafts = drafts

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.stateful:
            self.fill(sequence, canvas, predictions)
            return
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.end(canvas, predictions))
        while True:
            assert canvas.block is not None
            positions = canvas.masked(*canvas.block)
            chain = self._order(canvas, predictions, positions)[: self.drafts]
            if len(positions) == 1:
                self.commit(sequence, canvas, predictions, positions)
                return
            predictions.keep()
            tokens = predictions.tokens(chain)
            known = min(len(chain), len(positions) - 1)  # a full block predicts nothing
            drafted = yield from self.forward(
                sequence,
                canvas,
                [canvas.copy_tokens(chain[:k], tokens[:k]) for k in range(1, known + 1)],
                canvas.block,
            )
            for ahead, one in enumerate(drafted, 1):
                one.step = canvas.step + ahead
            reached = self._reached(canvas, drafted, chain, tokens, positions)
            for position, said in zip(chain[:reached], [predictions, *drafted], strict=False):
                self.commit(sequence, canvas, said, np.array([position]))
                if sequence.finished:
                    return
            if canvas.block is None:
                return
            predictions = drafted[reached - 1]

    def _order(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """`positions`, the ones filled first in front."""
        order: np.ndarray = positions[best_first(self.ranking.rank(canvas, predictions, positions))]
        return order

    def _reached(
        self,
        canvas: Canvas,
        drafted: list[Predictions],
        chain: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> int:
        """How many drafts the slow decoder would have reached. The first is its next step."""
        for reached in range(1, len(chain)):
            predictions = drafted[reached - 1]
            left = np.setdiff1d(positions, chain[:reached])
            best = self._order(canvas, predictions, left)[0]
            if best != chain[reached] or predictions.token(best) != tokens[reached]:
                return reached
        return len(chain)

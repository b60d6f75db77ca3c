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
        [look] = yield from self.look(sequence, canvas)
        if sequence.policy.stateful:
            self.fill(sequence, canvas, look)
            return
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.end(canvas, look))
        while True:
            assert canvas.block is not None
            places = canvas.masked(*canvas.block)
            chain = self._order(canvas, look, places)[: self.drafts]
            if len(places) == 1:
                self.commit(sequence, canvas, look, places)
                return
            look.keep()
            tokens = look.tokens(chain)
            known = min(len(chain), len(places) - 1)  # a full block predicts nothing
            looks = yield from self.look(
                sequence,
                canvas,
                [canvas.copy_tokens(chain[:k], tokens[:k]) for k in range(1, known + 1)],
                canvas.block,
            )
            for ahead, one in enumerate(looks, 1):
                one.step = canvas.step + ahead
            reached = self._reached(canvas, looks, chain, tokens, places)
            for place, said in zip(chain[:reached], [look, *looks], strict=False):
                self.commit(sequence, canvas, said, np.array([place]))
                if sequence.finished:
                    return
            if canvas.block is None:
                return
            look = looks[reached - 1]

    def _order(self, canvas: Canvas, look: Predictions, places: np.ndarray) -> np.ndarray:
        """`places`, the ones filled first in front."""
        order: np.ndarray = places[best_first(self.ranking.rank(canvas, look, places))]
        return order

    def _reached(
        self,
        canvas: Canvas,
        looks: list[Predictions],
        chain: np.ndarray,
        tokens: np.ndarray,
        places: np.ndarray,
    ) -> int:
        """How many drafts the slow decoder would have reached. The first is its next step."""
        for reached in range(1, len(chain)):
            look = looks[reached - 1]
            left = np.setdiff1d(places, chain[:reached])
            best = self._order(canvas, look, left)[0]
            if best != chain[reached] or look.token(best) != tokens[reached]:
                return reached
        return len(chain)

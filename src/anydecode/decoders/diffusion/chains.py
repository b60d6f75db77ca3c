"""Draft-and-verify denoising: several one-token denoising steps are verified in one forward pass.

The canvas after each of the next steps is drafted from the last predictions. One pass scores all
drafts, and the steps that one-token denoising would have taken are kept. The text is that of
one-token denoising, at every temperature.
"""

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
    """Drafts up to `drafts` denoising steps ahead.

    Draft k is the canvas with the k best-ranked masks unmasked. It is accepted if the predictions
    for draft k - 1 lead to it.
    """

    def __init__(
        self,
        drafts: int,
        blocks: BlockPolicy,
        ranking: Ranking,
        cache: CachePolicy,
        mask: int | None = None,
    ) -> None:
        if drafts < 1:
            raise InvalidRequestError(
                f"drafts must be at least 1 (at least one draft), not {drafts}"
            )
        super().__init__(blocks, ranking, cache=cache, mask=mask)
        self.drafts = drafts

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.is_stateful:
            self.unmask_step(sequence, canvas, predictions)
            return
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
        while True:
            assert canvas.block is not None
            positions = canvas.masked(*canvas.block)
            chain = self._order(canvas, predictions, positions)[: self.drafts]
            if len(positions) == 1:
                self.commit(sequence, canvas, predictions, positions)
                return
            predictions.keep()
            tokens = predictions.tokens(chain)
            num_drafts = min(len(chain), len(positions) - 1)  # a full block predicts nothing
            drafted = yield from self.forward(
                sequence,
                canvas,
                [canvas.copy_tokens(chain[:k], tokens[:k]) for k in range(1, num_drafts + 1)],
                canvas.block,
            )
            for offset, draft in enumerate(drafted, 1):
                draft.step = canvas.step + offset
            reached = self._reached(canvas, drafted, chain, tokens, positions)
            for position, source in zip(chain[:reached], [predictions, *drafted], strict=False):
                self.commit(sequence, canvas, source, np.array([position]))
                if sequence.finished:
                    return
            if canvas.block is None:
                return
            predictions = drafted[reached - 1]

    def _order(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """`positions` in the order in which they would be unmasked."""
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
        """How many drafts one-token denoising would reach; the first is always its next step."""
        for reached in range(1, len(chain)):
            predictions = drafted[reached - 1]
            remaining = np.setdiff1d(positions, chain[:reached])
            best = self._order(canvas, predictions, remaining)[0]
            if best != chain[reached] or predictions.token(best) != tokens[reached]:
                return reached
        return len(chain)

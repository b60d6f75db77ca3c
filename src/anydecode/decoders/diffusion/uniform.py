"""Denoising of models whose noise is random tokens instead of masks (uniform-state diffusion).

Every position of the block holds a token in every pass, and every position may change until the
block is finished. Positions that are not final are those that other decoders call masked.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Numbers of the coins of a position, of those with the purpose "unmask".
_FIRST_COIN, _LATER_COIN = 3, 4
#: In `Canvas.policy_state`: the first position of the block's rows, and the expected embeddings of
#: the last pass over them.
_EXPECTED = "expected embeddings"
#: A deviation of these methods.
STATEFUL = (
    "with constraints and other stateful samplers, positions become final one after the other, from"
    " left to right"
)


class UniformDenoiser(Denoiser):
    """Denoises the block in `num_steps` steps, after which all its tokens are final.

    The mask token, which a model of this kind need not have, is neither noise nor predicted.
    """

    needs_mask = False
    steps: int | None = None

    def mask_token(self, sequence: Sequence) -> int | None:
        """The mask token, or -1."""
        mask = super().mask_token(sequence)
        return -1 if mask is None else mask

    def banned(self, sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
        spec = sequence.model().spec
        unused = range(spec.num_noise_tokens or spec.vocab_size, spec.vocab_size)
        return (*super().banned(sequence, canvas), *unused)

    def num_steps(self, canvas: Canvas) -> int:
        """The number of steps of the block (default: one per position)."""
        return self.steps or canvas.block_masks

    def time(self, canvas: Canvas) -> float:
        return 1.0 if canvas.block is None else 1 - canvas.block_step / self.num_steps(canvas)

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        fresh = [i for i in canvas.masks.tolist() if canvas.tokens[i] == canvas.mask]
        canvas.renoise(fresh, [self.noise(sequence, canvas, i, _FIRST_COIN) for i in fresh])
        if sequence.sampler.is_stateful:
            yield from super().step(sequence, canvas)
            return
        [predictions] = yield from self.forward(sequence, canvas)
        if canvas.block is None:
            canvas.open(*block)
            self.on_opened(canvas)
        positions = canvas.masked(*block)
        is_last = canvas.block_step + 1 >= self.num_steps(canvas)
        tokens, is_final = self.denoise(sequence, canvas, predictions, positions, is_last)
        if is_final:
            self.commit(sequence, canvas, predictions, positions, tokens.tolist())
            return
        canvas.renoise(positions, tokens)
        self.commit(sequence, canvas, predictions, positions[:0], [])

    def on_opened(self, canvas: Canvas) -> None:
        """Called when a block has been opened."""

    def embeddings(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> np.ndarray | None:
        model: Any = sequence.model()
        if not model.spec.has_canvas:
            return None
        expected = None
        if canvas.block is not None and _EXPECTED in canvas.policy_state:
            first, rows = canvas.policy_state[_EXPECTED]
            expected = rows[positions - first]
        return np.asarray(model.canvas_inputs(canvas.tokens[positions], expected))

    def predicted(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray, rows: Iterable[np.ndarray]
    ) -> None:
        """Remember, for the next pass over the block, the distributions that were predicted for
        `positions`, float `[vocab_size]` each. Other positions are known with certainty."""
        model: Any = sequence.model()
        if not model.spec.has_canvas:
            return
        assert canvas.block is not None
        first, stop = canvas.block_start(canvas.block[0]), canvas.block[1]
        probabilities = np.zeros((stop - first, model.spec.vocab_size), np.float32)
        probabilities[np.arange(stop - first), canvas.tokens[first:stop]] = 1.0
        for position, row in zip(positions, rows, strict=True):
            probabilities[position - first] = 0.0
            probabilities[position - first, : len(row)] = row
        canvas.policy_state[_EXPECTED] = first, model.expected_embeddings(probabilities)

    @abstractmethod
    def denoise(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        is_last: bool,
    ) -> tuple[np.ndarray, bool]:
        """The tokens that `positions` hold after this step, and whether they are final, as they
        must be after the last step."""

    def noise(
        self, sequence: Sequence, canvas: Canvas, position: int, coin: int = _LATER_COIN
    ) -> int:
        """A random token for `position`, by the noise of the position and step."""
        spec = sequence.model().spec
        size = spec.num_noise_tokens or spec.vocab_size
        has_mask = 0 <= canvas.mask < size
        drawn = sequence.noise.with_purpose("unmask").coin(position, canvas.step, coin)
        token = int(drawn * (size - has_mask))
        return token + (has_mask and token >= canvas.mask)

"""Bounded adaptive confidence decoding, and think coarse, critic fine (Lu et al., "Advancing Block
Diffusion Language Models for Test-Time Scaling", arXiv:2602.09555).

The confidence threshold is the mean confidence of the tokens committed in the block so far, within
two bounds. Blocks are large while the model is thinking. Instead of the end of the thinking, a
sentence that asks for mistakes is put on the canvas, and what follows is denoised in small blocks.
Models are trained for that with block sizes that double: `anydecode train block-adapter
--first-block`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import BlockCausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence

#: The sentence of the released code with which the second phase begins.
CRITIC = "Let's check if there are any mistakes and give the final answer."
#: In `Canvas.policy_state`: whether the second phase has begun.
_IS_FINE = "is fine"


class BoundedAdaptiveThreshold(UnmaskPolicy):
    """Unmasks every mask with a rank of at least the adaptive threshold.

    The threshold is the mean confidence of the tokens committed in this block, limited to the range
    `low` to `high`. In a new block the largest rank takes the place of the mean.
    """

    def __init__(self, low: float, high: float) -> None:
        if not 0 <= low <= high <= 1:
            raise InvalidRequestError(
                f"bacd-tccf needs 0 <= low <= high <= 1, not low={low}, high={high}"
            )
        self.low = low
        self.high = high

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        inside = slice(*canvas.block)
        committed = canvas.confidence[inside][canvas.committed[inside] >= 0]
        level = float(np.mean(committed)) if len(committed) else float(ranks.max())
        return ranks >= min(max(level, self.low), self.high)


class TwoPhaseBlocks(BlockPolicy):
    """Blocks of `coarse` positions in the first phase, of `fine` positions in the second.

    Args:
        coarse: Positions per block in the first phase.
        fine: Positions per block in the second phase.
        is_grid: Whether these are the blocks that rows see: then they are counted from the first
            position of the text, and the end of the prompt is part of the first one.
    """

    def __init__(self, coarse: int, fine: int, is_grid: bool = False) -> None:
        if coarse < 1 or fine < 1:
            raise InvalidRequestError(
                f"coarse and fine must be at least 1, not {coarse} and {fine}"
            )
        self.coarse = coarse
        self.fine = fine
        self.is_grid = is_grid

    def window_end(self, canvas: Canvas) -> int:
        is_fine = canvas.policy_state[_IS_FINE]
        if not self.is_grid:
            size = self.fine if is_fine else self.coarse
            return min(canvas.frontier + size, len(canvas))
        if is_fine and canvas.later_blocks is None and canvas.block is None:
            canvas.later_blocks = canvas.frontier, self.fine
        return min(canvas.block_end(canvas.frontier), len(canvas))


class TwoPhaseDenoiser(Denoiser):
    """Begins the second phase as soon as the text before the first mask contains the marker.

    If there is a critic, it takes the place of the marker and of all that was unmasked behind it;
    else the second phase begins with the next block.
    """

    marker = "</think>"
    critic = CRITIC

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        tokenizer = sequence.tokenizers[TARGET]
        canvas.policy_state["marker"] = tokenizer.encode(self.marker, special=False)
        canvas.policy_state["critic"] = tokenizer.encode(self.critic, special=False)
        canvas.policy_state[_IS_FINE] = False
        super().begin(sequence, canvas)

    def finish_step(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: Iterable[int],
        **trace_fields: Any,
    ) -> None:
        if not canvas.policy_state[_IS_FINE]:
            first = _find(canvas.policy_state["marker"], self._answer(canvas, canvas.frontier))
            if first is not None:
                canvas.policy_state[_IS_FINE] = True
                if self._has_critic(canvas):
                    self._criticize(sequence, canvas, canvas.policy_state["start"] + first)
        super().finish_step(sequence, canvas, predictions, chosen, **trace_fields)

    def emitted_stop(self, canvas: Canvas) -> int:
        """Before the second phase, what may be the beginning of the marker is not final."""
        stop = super().emitted_stop(canvas)
        state = canvas.policy_state
        if state[_IS_FINE] or not self._has_critic(canvas) or not len(canvas.masks):
            return stop
        marker, answer = state["marker"], self._answer(canvas, stop)
        sizes = range(min(len(marker) - 1, len(answer)), 0, -1)
        return stop - next((size for size in sizes if answer[-size:] == marker[:size]), 0)

    def _criticize(self, sequence: Sequence, canvas: Canvas, first: int) -> None:
        """Put the critic on the canvas from `first` on, followed by masks."""
        length = len(canvas)
        canvas.splice(first, length, length - first)
        for position, token in enumerate(canvas.policy_state["critic"][: length - first], first):
            canvas.fix(position, token)
        canvas.block = None
        self.cache.on_replaced(canvas)
        kv_cache = sequence.kv_cache()
        if self.cache.is_exact_blocks and kv_cache.length > canvas.block_start(first):
            kv_cache.truncate(canvas.block_start(first))

    @staticmethod
    def _has_critic(canvas: Canvas) -> bool:
        """Whether a critic may replace tokens: never in infilling, where text follows the masks."""
        return bool(canvas.policy_state["critic"]) and not canvas.is_fixed_length

    @staticmethod
    def _answer(canvas: Canvas, stop: int) -> list[int]:
        tokens: list[int] = canvas.tokens[canvas.policy_state["start"] : stop].tolist()
        return tokens


@register(
    Card(
        "bacd-tccf",
        "diffusion",
        paper="Advancing Block Diffusion Language Models for Test-Time Scaling (arXiv:2602.09555)",
        exactness="lossy",
        summary="Adapts the threshold to the block's confidence; smaller blocks for the answer.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "with another cache than block, a model's own blocks limit what a row sees",
            "the critic takes the place of the marker within one generation; the released code"
            " generates a second time, with the blocks of the second phase for the prompt too",
            "by default (cache='none') every pass computes the whole canvas; the paper's models"
            " cache finished blocks (cache='block')",
            "the training with growing blocks (`anydecode train block-adapter --first-block`) is"
            " that of adapters, over one schedule of the learning rate",
        ),
        remote={
            "low": Range(0, 1),
            "high": Range(0, 1),
            "coarse": Range(1, 256),
            "fine": Range(1, 256),
            "marker": Text(64),
            "critic": Text(1024),
            "cache": CACHE_WORDS,
        },
    )
)
def bacd_tccf(
    low: float = 0.6,
    high: float = 0.9,
    coarse: int = 16,
    fine: int = 4,
    marker: str = "</think>",
    critic: str = CRITIC,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with an adaptive threshold, in blocks of two sizes.

    Args:
        low: The smallest threshold.
        high: The largest threshold.
        coarse: Positions per block until `marker` is generated.
        fine: Positions per block after that.
        marker: The text that ends the thinking.
        critic: The text that replaces the marker ("": the marker stays).
        cache: "block": rows see the blocks of both phases, and finished blocks are cached exactly,
            for models that were trained with several block sizes; or "none", "prefix", "dual",
            "vicinity", "window", "elastic".
        mask: The mask token (default: the tokenizer's).
    """
    if not marker:
        raise InvalidRequestError("marker must not be empty: it is the text that ends the thinking")
    is_grid = cache == "block"
    decoder = TwoPhaseDenoiser(
        TwoPhaseBlocks(coarse, fine, is_grid),
        Confidence(),
        BoundedAdaptiveThreshold(low, high),
        BlockCausalCache(coarse) if is_grid else cache_named(cache),
        mask=mask,
    )
    decoder.marker, decoder.critic = marker, critic
    return decoder


def _find(part: list[int], tokens: list[int]) -> int | None:
    """Where `tokens` contain `part` first, or None."""
    starts = range(len(tokens) - len(part) + 1)
    return next((i for i in starts if tokens[i : i + len(part)] == part), None)

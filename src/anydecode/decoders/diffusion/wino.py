"""WINO (Hong et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs",
arXiv:2507.18578): steps unmask many masks at a low threshold, and the same pass verifies the tokens
of the steps before.

Behind the canvas a pass has one mask row per position of the block. It sees the canvas without its
own position, so that it predicts a token from all others. A token that it finds unlikely is masked
again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import LargestBlocks
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import EXACT_CACHES, EXACT_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import best_first
from anydecode.decoders.diffusion.revising import STATEFUL, BlockwiseDenoiser
from anydecode.decoders.framework.canvas_spans import CanvasSpan
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from anydecode.scoring.score import Decoding, ScoreRequest
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT

#: In `Canvas.policy_state`: how many masks the last step of the block unmasked.
_LAST = "wino unmasked"
#: That number before the first step of a block.
_BEFORE_FIRST = 30


@dataclass(eq=False)
class ShadowSpan(CanvasSpan):
    """The rows of a canvas that the cache does not have, then mask rows at the last `shadows` of
    `positions`.

    Rows of the canvas see its first `visible` positions. Each mask row sees the same, without the
    canvas's row at its own position, and all mask rows.

    Attributes:
        shadows: The number of mask rows.
    """

    shadows: int = 0

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        stop, first = at + count, at + count - self.shadows
        slots = np.full(int(self.visible.max()), -1, np.int32)
        slots[: self.kv_cache.length] = self.kv_cache.table
        slots[self.positions[: count - self.shadows]] = self._slots[: count - self.shadows]
        self._fill_inputs(rows, at, count)
        rows.table[at:first] = len(rows.tables)
        rows.tables.append(slots)
        for row, own in enumerate(self.positions[count - self.shadows :].tolist(), first):
            others = slots.copy()
            others[own] = -1
            rows.table[row] = len(rows.tables)
            rows.tables.append(others)
        rows.slots[at:stop] = self._slots
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = self.visible
        rows.tail_start[at:stop] = len(rows.tails)
        rows.tail_length[at:first] = 0
        rows.tail_length[first:stop] = self.shadows
        rows.tails = np.concatenate([rows.tails, self._slots[count - self.shadows :]])


class Revoking(BlockwiseDenoiser):
    """Unmasks masks above `threshold`, and masks tokens below `keep` again."""

    threshold = 0.6
    keep = 0.9

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if sequence.model().spec.logit_shift:
            raise UnsupportedCombinationError(
                "wino needs a diffusion model without shifted logits: a row must predict its own"
                " position"
            )

    def on_opened(self, canvas: Canvas) -> None:
        canvas.policy_state[_LAST] = _BEFORE_FIRST

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        if sequence.sampler.is_stateful:
            yield from super().step(sequence, canvas)
            return
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        cells = np.arange(*block)
        cells = cells[canvas.committed[cells] >= MASKED]
        span = self._span(sequence, canvas, cells, block)
        shadows = range(len(span) - len(cells), len(span))
        span.output_rows = [*(cells - span.positions[0]).tolist(), *shadows]
        outputs = [span.tokens[row] for row in span.output_rows]
        leading = self.cache.leading_spans(
            canvas, sequence.kv_cache(), block, opens_block=canvas.block is None
        )
        spans: list[Span] = [*leading, span]
        self.set_time(sequence, canvas, spans)
        twice = np.tile(cells, 2)
        scores = yield ScoreRequest(sequence, TARGET, [spans], twice, [ROOT] * len(twice), outputs)
        self._record_pass(canvas, spans, "")
        count = len(cells)
        predictions = self.predictions(sequence, canvas, scores, range(count))
        others = self.predictions(sequence, canvas, scores, range(count, 2 * count))
        self.open(canvas, block)
        self.revoke(sequence, canvas, predictions, others)

    def revoke(
        self, sequence: Sequence, canvas: Canvas, predictions: Predictions, shadows: Predictions
    ) -> None:
        """Unmask and mask again, given the canvas's predictions and those of the mask rows."""
        assert canvas.block is not None
        masks = canvas.masked(*canvas.block)
        confidence = predictions.confidence(masks)
        limit = int(np.clip(int(0.7 * len(masks)), 5, 20))
        order = best_first(confidence)
        num_chosen = max(1, min(int((confidence > self.threshold).sum()), limit))
        chosen = np.sort(masks[order[:num_chosen]])
        tokens = np.setdiff1d(self.free_positions(canvas), masks)
        likely = np.array([shadows.probability_drawn(i, int(canvas.tokens[i])) for i in tokens])
        worst = np.argsort(likely, kind="stable")[: canvas.policy_state[_LAST] - 1]
        revoked = tokens[worst[likely[worst] < self.keep]] if num_chosen > 1 else tokens[:0]
        canvas.policy_state[_LAST] = num_chosen
        self.finish_revision(
            sequence, canvas, predictions, chosen, np.sort(revoked), is_settled=True
        )

    def _span(
        self, sequence: Sequence, canvas: Canvas, cells: np.ndarray, block: tuple[int, int]
    ) -> ShadowSpan:
        kv_cache = sequence.kv_cache()
        stop = int(canvas.visible(cells[-1:])[0])
        first = canvas.block_start(block[0]) if self.cache.is_exact_blocks else 0
        positions = np.concatenate([np.arange(first, stop), cells]).astype(np.int32)
        masks = np.full(len(cells), canvas.mask, np.int32)
        tokens = np.concatenate([canvas.tokens[first:stop], masks])
        return ShadowSpan(
            kv_cache,
            tokens.tolist(),
            0,
            kv_cache.pool.model.spec.num_layers,
            positions=positions,
            visible=canvas.visible(positions),
            shadows=len(cells),
        )


@register(
    Card(
        "wino",
        "diffusion",
        paper="Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs"
        " (arXiv:2507.18578)",
        exactness="lossy",
        summary="Unmasks above a low threshold, and masks tokens again that the rest contradicts.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "models with shifted logits are refused; the paper has no cache",
            STATEFUL,
            "the mask token is never generated",
        ),
        remote={
            "threshold": Range(0, 1),
            "keep": Range(0, 1),
            "block": Range(0, 4096),
            "cache": EXACT_WORDS,
        },
    )
)
def wino(
    threshold: float = 0.6,
    keep: float = 0.9,
    block: int = 128,
    cache: str = "none",
    mask: int | None = None,
) -> Revoking:
    """Denoises wide, and revokes tokens that the others contradict.

    Args:
        threshold: Masks with more confidence are unmasked: at most 70 % of the block's masks, or
            5, whichever is more, and 20 at most; at least the best one.
        keep: Tokens that the others make less probable than this are masked again, if the step
            unmasks at least two: at most as many as the step before unmasked, minus one.
        block: Positions per block (0: the whole canvas); a canvas may be shorter.
        cache: "none" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    for name, value in (("threshold", threshold), ("keep", keep)):
        if not 0 <= value <= 1:
            raise InvalidRequestError(f"{name} must be between 0 and 1, not {value}")
    decoder = Revoking(LargestBlocks(block), cache=cache_named(cache, EXACT_CACHES), mask=mask)
    decoder.threshold, decoder.keep = threshold, keep
    return decoder

"""Levenshtein editing: a step unmasks masks and replaces tokens of the block as token editing does,
and two control tokens remove a token and put a mask before one ("LLaDA2.2", Inclusion AI, 2026).

The block keeps its length: what an inserted mask pushes out of it is dropped, and masks are
appended for removed tokens. Masks that were not there when the block was opened are unmasked beside
the schedule of those that were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.caches import DEVIATIONS, BlockCausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import (
    IS_SETTLED,
    STATEFUL,
    RevisedBlocks,
    RevisingDenoiser,
)
from anydecode.decoders.diffusion.unmasking import top_k
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: the `_BlockState` of the open block.
_STATE = "levenshtein-editing state"
#: How many tokens are tried for a block that differs from all before it.
_ESCAPES = 5


@dataclass
class _BlockState:
    """The state of an open block.

    Attributes:
        originals: Where the masks are now that the block was opened with, unmasked or not.
        post_steps: How many steps in a row have begun with all of these unmasked.
        seen: The tokens of the block after each step, before masks are inserted and tokens removed.
    """

    originals: list[int]
    post_steps: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)


class LevenshteinEditing(RevisingDenoiser):
    """Unmasks masks, replaces tokens, removes tokens and inserts masks in the same step.

    A block is closed when a step that began without masks changed nothing, and after the last step
    of its budget, which unmasks all masks and neither removes nor inserts.
    """

    delete: int | None = None
    split: int | None = None
    threshold = 0.5
    edit = 0.0
    steps = 32
    max_post_steps = 16
    max_steps = 1000

    def controls(self, sequence: Sequence) -> tuple[int | None, int | None]:
        """The tokens that remove a position and that put a mask before one."""
        delete, split = sequence.model().spec.edit_tokens or (None, None)
        return (
            delete if self.delete is None else self.delete,
            split if self.split is None else self.split,
        )

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        delete, split = self.controls(sequence)
        controls, mask = _tokens(delete, split), self.mask_token(sequence)
        size = sequence.model().spec.vocab_size
        if controls and max(controls) >= size:
            raise InvalidRequestError(
                f"delete={delete}, split={split} must be below the vocabulary size {size}"
            )
        if len({*controls, mask}) <= len(controls):
            raise InvalidRequestError(
                "delete, split and the mask token must be different tokens, not"
                f" {delete}, {split} and {mask}"
            )

    def banned(self, sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
        if canvas.is_fixed_length or sequence.sampler.is_stateful:
            return tuple(_tokens(*self.controls(sequence)))
        return ()

    def on_opened(self, canvas: Canvas) -> None:
        assert canvas.block is not None
        originals = canvas.masked(*canvas.block).tolist()
        canvas.policy_state[_STATE] = _BlockState(originals)

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        state: _BlockState = canvas.policy_state[_STATE]
        positions = self.free_positions(canvas)
        is_mask = canvas.committed[positions] < 0
        is_original = is_mask & np.isin(positions, state.originals)
        state.post_steps = 0 if is_original.any() else state.post_steps + 1
        before, tokens = canvas.tokens[positions].copy(), predictions.tokens(positions)
        confidence = predictions.confidence(positions)
        is_last = canvas.block_step >= self.max_steps - 1 or (
            0 < self.max_post_steps <= state.post_steps
        )
        is_filled = self._filled(canvas, is_mask, is_original, confidence, is_last)
        if not self.max_post_steps and is_filled[is_original].all():
            is_last, is_filled = True, is_mask
        is_written = is_filled | (~is_mask & (tokens != before) & (confidence > self.edit))
        written = np.where(is_written, tokens, before)
        if is_last:
            controls = _tokens(*self.controls(sequence))
            for index in np.flatnonzero(is_written & np.isin(written, controls)):
                written[index] = self._other(predictions, positions[index], controls)
        else:
            self._escape(state, predictions, positions, before, written, confidence)
        state.seen.add(tuple(written.tolist()))
        is_changed = written != before
        canvas.policy_state[IS_SETTLED] = is_last or not (is_mask.any() or is_changed.any())
        self._apply(sequence, canvas, predictions, positions, written, is_changed)

    def _filled(
        self,
        canvas: Canvas,
        is_mask: np.ndarray,
        is_original: np.ndarray,
        confidence: np.ndarray,
        is_last: bool,
    ) -> np.ndarray:
        """Which positions of the block are unmasked in this step."""
        if is_last or canvas.block_step >= self.steps:
            return is_mask
        base, remainder = divmod(canvas.block_masks, self.steps)
        num_new = np.count_nonzero(is_mask & ~is_original)
        count = base + (canvas.block_step < remainder) + num_new
        is_sure: np.ndarray = is_mask & (confidence > self.threshold)
        if np.count_nonzero(is_sure) >= count:
            return is_sure
        result = np.zeros(len(is_mask), bool)
        result[is_mask] = top_k(confidence[is_mask], count)
        return result

    def _escape(
        self,
        state: _BlockState,
        predictions: Predictions,
        positions: np.ndarray,
        before: np.ndarray,
        written: np.ndarray,
        confidence: np.ndarray,
    ) -> None:
        """Where a step would lead to a block that was seen already, let its least sure change take
        another token. Changes `written`."""
        changed = np.flatnonzero(written != before)
        if not len(changed):
            return
        index = changed[confidence[changed].argmin()]
        tried: list[int] = []
        while tuple(written.tolist()) in state.seen and len(tried) < _ESCAPES:
            tried.append(int(written[index]))
            written[index] = self._other(predictions, positions[index], tried)

    @staticmethod
    def _other(predictions: Predictions, position: int, excluded: list[int]) -> int:
        """The token sampled for a position if some are excluded."""
        logits = predictions.logits(position).copy()
        logits[excluded] = -np.inf
        sequence, sampler = predictions.sequence, predictions.sampler
        return sequence.sample(sampler, logits, int(position), predictions.step)

    def _apply(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        written: np.ndarray,
        is_changed: np.ndarray,
    ) -> None:
        """Write tokens, then remove and insert, and finish the step."""
        controls = self.controls(sequence)
        deleted, split = (
            positions[is_changed & (written == (-1 if token is None else token))].tolist()
            for token in controls
        )
        is_token = is_changed & ~np.isin(written, _tokens(*controls))
        values = dict(zip(positions[is_token].tolist(), written[is_token].tolist(), strict=True))
        filled = [position for position in values if canvas.committed[position] < 0]
        edited = [position for position in values if canvas.committed[position] >= 0]
        for group, change in ((filled, canvas.commit), (edited, canvas.edit)):
            tokens = [values[position] for position in group]
            self.write(sequence, canvas, predictions, group, tokens, change)
        if deleted or split:
            self._rearrange(canvas, deleted, split)
        self.finish_step(
            sequence, canvas, predictions, filled, edited=edited, deleted=deleted, inserted=split
        )

    @staticmethod
    def _rearrange(canvas: Canvas, deleted: list[int], split: list[int]) -> None:
        """Remove the positions `deleted` and put a mask before those of `split`."""
        assert canvas.block is not None
        first, stop = canvas.block
        sources: list[int | None] = []
        for position in range(first, stop):
            sources += [None] * (position in split)
            sources += [position] * (position not in deleted)
        sources = (sources + [None] * (stop - first))[: stop - first]
        canvas.rearrange(first, sources)
        state: _BlockState = canvas.policy_state[_STATE]
        originals = set(state.originals)
        state.originals = [first + i for i, source in enumerate(sources) if source in originals]


def _tokens(*tokens: int | None) -> list[int]:
    """Those that are given."""
    return [token for token in tokens if token is not None]


@register(
    Card(
        "levenshtein-editing",
        "diffusion",
        paper="LLaDA2.2 (Inclusion AI, 2026)",
        exactness="lossy",
        summary="Token editing with control tokens that remove tokens and insert masks.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            *DEVIATIONS,
            STATEFUL,
            "the mask token is never generated",
            "where a step would lead to a block that was seen before, the changed token of the"
            " lowest confidence is sampled again without those that were tried, up to five times;"
            " the released code draws a position at random each time, and excludes its token alone",
            "the last step that `max_steps` allows unmasks all; the released code stops with masks"
            " left",
            "control tokens in the prompt stay; the released code carries them out",
            "with masks in the prompt, nothing is removed or inserted",
        ),
        bounds={"delete": Range(0, 1 << 20), "split": Range(0, 1 << 20)},
        remote={
            "block": Range(1, 4096),
            "threshold": Range(0, 1),
            "edit": Range(0, 1),
            "steps": Range(1, 4096),
            "max_post_steps": Range(0, 64),
            "max_steps": Range(2, 4096),
        },
    )
)
def levenshtein_editing(
    delete: int | None = None,
    split: int | None = None,
    block: int | None = None,
    threshold: float = 0.5,
    edit: float = 0.0,
    steps: int = 32,
    max_post_steps: int = 16,
    max_steps: int = 1000,
    mask: int | None = None,
) -> LevenshteinEditing:
    """Denoises block by block, and edits, removes and inserts tokens until the block is finished.

    For models that were trained with the control tokens, such as LLaDA2.2.

    Args:
        delete: The token that removes the position where it is predicted (default: the model's, if
            its config names one; else none does).
        split: The token that puts a mask before the position where it is predicted, which keeps
            what it held (default: as for `delete`).
        block: Positions per block (default: the model's own block size).
        threshold: Masks with more confidence are unmasked, if those are at least as many as the
            schedule unmasks; else the best ones.
        edit: Tokens are replaced by another one with more confidence than this.
        steps: The steps of the schedule for the masks of a block; after them, every step unmasks
            all.
        max_post_steps: The largest number of steps in a row that begin without a mask of those that
            the block was opened with. 0: the step that unmasks the last of these is the last.
        max_steps: The largest number of steps of a block.
        mask: The mask token (default: the tokenizer's).
    """
    for name, value in (("threshold", threshold), ("edit", edit)):
        if not 0 <= value <= 1:
            raise InvalidRequestError(f"{name} must be between 0 and 1, not {value}")
    cache = BlockCausalCache(block)
    decoder = LevenshteinEditing(RevisedBlocks(block), cache=cache, mask=mask, tempered=True)
    decoder.delete, decoder.split = delete, split
    decoder.threshold, decoder.edit, decoder.steps = threshold, edit, steps
    decoder.max_post_steps, decoder.max_steps = max_post_steps, max_steps
    return decoder

"""Token editing: a step unmasks confident masks of the block and replaces tokens of the block for
which the model has become confident of another one (Bie et al., "LLaDA2.1: Speeding Up Text
Diffusion via Token Editing", arXiv:2602.08676).

A block that holds no mask is edited further until a step changes nothing. Its tokens are emitted
when it is finished, because until then each of them may change. With multi-block editing, the last
finished blocks are edited together with the next one, and are emitted when they are too old for
that.
"""

from __future__ import annotations

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
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, TopKUnmasking
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: how many steps of the block began without masks.
_POST_STEPS = "token-editing post steps"


class TokenEditing(RevisingDenoiser):
    """Unmasks masks and edits tokens of the block in the same step.

    A block is closed by a step that began without masks and edits nothing, or after
    `max_post_steps` steps that began without masks. The `revisit` blocks before it are edited with
    it.
    """

    edit = 0.9
    max_post_steps = 16
    revisit = 0

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if self.revisit and sequence.model().spec.has_causal_context:
            raise UnsupportedCombinationError(
                "revisit needs a model whose finished blocks are seen as they were filled; before"
                " the open block, rows of this model see earlier positions only"
            )

    def emitted_stop(self, canvas: Canvas) -> int:
        stop = super().emitted_stop(canvas)
        if not self.revisit or self.is_complete(canvas):
            return stop
        return self._first(canvas, canvas.block[0] if canvas.block else stop)

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        if not self.revisit or sequence.sampler.is_stateful:
            yield from super().step(sequence, canvas)
            return
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        region = self._first(canvas, block[0]), block[1]
        [predictions] = yield from self.forward(sequence, canvas, region=region)
        self.open(canvas, block)
        self.revise(sequence, canvas, predictions)

    def _first(self, canvas: Canvas, start: int) -> int:
        """The first position that may be edited while the block that begins at `start`, or a part
        of it, is open."""
        if not self.revisit:
            return start
        assert canvas.block_size is not None, "the cache needs blocks"
        first = canvas.block_start(start) - self.revisit * canvas.block_size
        return max(first, int(canvas.policy_state["start"]))

    def on_opened(self, canvas: Canvas) -> None:
        canvas.policy_state[_POST_STEPS] = 0

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        assert canvas.block is not None
        masks = canvas.masked(*canvas.block)
        first, stop = canvas.block
        edited = self._edited(canvas, predictions, self._first(canvas, first), stop)
        canvas.policy_state[_POST_STEPS] += not len(masks)
        is_unchanged = not len(masks) and not len(edited)
        canvas.policy_state[IS_SETTLED] = (
            is_unchanged or canvas.policy_state[_POST_STEPS] >= self.max_post_steps
        )
        tokens = predictions.tokens(edited).tolist()
        self.write(sequence, canvas, predictions, edited, tokens, canvas.edit)
        chosen = self.choose(canvas, predictions, masks) if len(masks) else masks
        self.commit(sequence, canvas, predictions, chosen, edited=edited.tolist())

    def _edited(
        self, canvas: Canvas, predictions: Predictions, first: int, stop: int
    ) -> np.ndarray:
        """The positions `first..stop` whose tokens are replaced."""
        positions = np.arange(first, stop)
        positions = positions[canvas.committed[positions] >= 0]
        differs = predictions.tokens(positions) != canvas.tokens[positions]
        result: np.ndarray = positions[differs & (predictions.confidence(positions) > self.edit)]
        return result


@register(
    Card(
        "token-editing",
        "diffusion",
        paper="LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676)",
        exactness="lossy",
        summary="Unmasks masks above a threshold, and replaces tokens of the block above another.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            *DEVIATIONS,
            STATEFUL,
            "the mask token is never generated",
            "which blocks multi-block editing revisits, and when, is not published: here it is the"
            " `revisit` blocks before the open one, in each of its steps",
        ),
        remote={
            "block": Range(1, 4096),
            "threshold": Range(0, 1),
            "edit": Range(0, 1),
            "max_post_steps": Range(0, 64),
            "revisit": Range(0, 64),
        },
    )
)
def token_editing(
    block: int | None = None,
    threshold: float = 0.95,
    edit: float = 0.9,
    max_post_steps: int = 16,
    revisit: int = 0,
    mask: int | None = None,
) -> TokenEditing:
    """Denoises block by block, and edits tokens until the block is finished.

    For models that were trained to correct tokens, such as LLaDA2.1, whose authors also give
    threshold=0.7, edit=0.5 ("quality") and threshold=0.5, edit=0 ("speed"). A model that was
    trained with masks only does not know what to put in place of a token.

    Args:
        block: Positions per block (default: the model's own block size).
        threshold: Masks with more confidence are unmasked, at least the best one.
        edit: Tokens are replaced by another one with more confidence than this.
        max_post_steps: The largest number of steps of a block that holds no mask.
        revisit: How many finished blocks are edited together with the next one (multi-block
            editing). They are computed in every step, and streamed that much later. Not for models
            with a causal context.
        mask: The mask token (default: the tokenizer's).
    """
    for name, value in (("threshold", threshold), ("edit", edit)):
        if not 0 <= value <= 1:
            raise InvalidRequestError(f"{name} must be between 0 and 1, not {value}")
    if max_post_steps < 0:
        raise InvalidRequestError(f"max_post_steps must be 0 or more, not {max_post_steps}")
    if revisit < 0:
        raise InvalidRequestError(f"revisit must be 0 or more, not {revisit}")
    unmask = ThresholdOrSchedule(threshold, TopKUnmasking())
    blocks, cache = RevisedBlocks(block), BlockCausalCache(block)
    decoder = TokenEditing(blocks, unmask=unmask, cache=cache, mask=mask, tempered=True)
    decoder.edit, decoder.max_post_steps, decoder.revisit = edit, max_post_steps, revisit
    return decoder

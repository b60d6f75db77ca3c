"""Token editing: a step unmasks confident masks of the block and replaces tokens of the block for
which the model has become confident of another one (Bie et al., "LLaDA2.1: Speeding Up Text
Diffusion via Token Editing", arXiv:2602.08676).

A block that holds no mask is edited further until nothing changes. Its tokens are emitted when it
is finished, because until then each of them may change.
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
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: how many steps of the block began without masks.
_POST_STEPS = "token-editing post steps"


class TokenEditing(RevisingDenoiser):
    """Unmasks masks and edits tokens of the block in the same step.

    A block is closed when it holds no mask and the last step edited nothing, or after
    `max_post_steps` steps that began without masks.
    """

    edit = 0.9
    max_post_steps = 16

    def on_opened(self, canvas: Canvas) -> None:
        canvas.policy_state[_POST_STEPS] = 0

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        assert canvas.block is not None
        masks = canvas.masked(*canvas.block)
        edited = self._edited(canvas, predictions, canvas.block)
        canvas.policy_state[_POST_STEPS] += not len(masks)
        canvas.policy_state[IS_SETTLED] = (
            not len(edited) or canvas.policy_state[_POST_STEPS] >= self.max_post_steps
        )
        tokens = predictions.tokens(edited)
        canvas.edit(edited, tokens, predictions.confidence(edited))
        self._compute_logprobs(
            sequence, canvas, predictions, edited, tokens.tolist(), predictions.sampler
        )
        chosen = self.choose(canvas, predictions, masks) if len(masks) else masks
        self.commit(sequence, canvas, predictions, chosen, edited=edited.tolist())

    def _edited(
        self, canvas: Canvas, predictions: Predictions, block: tuple[int, int]
    ) -> np.ndarray:
        """The positions of the block whose tokens are replaced."""
        positions = np.arange(*block)
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
        ),
        missing=("multi-block editing: finished blocks are not edited",),
        remote={
            "block": Range(1, 4096),
            "threshold": Range(0, 1),
            "edit": Range(0, 1),
            "max_post_steps": Range(0, 64),
        },
    )
)
def token_editing(
    block: int | None = None,
    threshold: float = 0.95,
    edit: float = 0.9,
    max_post_steps: int = 16,
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
        mask: The mask token (default: the tokenizer's).
    """
    for name, value in (("threshold", threshold), ("edit", edit)):
        if not 0 <= value <= 1:
            raise InvalidRequestError(f"{name} must be between 0 and 1, not {value}")
    if max_post_steps < 0:
        raise InvalidRequestError(f"max_post_steps must be 0 or more, not {max_post_steps}")
    unmask = ThresholdOrSchedule(threshold, TopKUnmasking())
    blocks, cache = RevisedBlocks(block), BlockCausalCache(block)
    decoder = TokenEditing(blocks, unmask=unmask, cache=cache, mask=mask, tempered=True)
    decoder.edit, decoder.max_post_steps = edit, max_post_steps
    return decoder

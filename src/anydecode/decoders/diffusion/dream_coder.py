"""Dream's decoder with infilling of variable length (Xie et al., "Dream-Coder 7B: An Open Diffusion
Language Model for Code", arXiv:2509.01142; Wu et al., "DreamOn: Diffusion Language Models For Code
Infilling Beyond Fixed-size Canvas", arXiv:2602.01326).

An end of text inside an infilled region removes itself and the masks behind it in the region, and
an expand token becomes two masks. Regions can so become shorter or longer than the masks given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import WholeCanvas
from anydecode.decoders.diffusion.canvas import FIXED, Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.unmasking import TimeGrid
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence


class VariableInfilling(Denoiser):
    """Infills regions of variable length.

    In an infilled region that is followed by text, an end of text removes itself and the masks
    behind it in the region; tokens that were unmasked there stay. A token `expand` is replaced by
    two masks.

    The number of expansions is limited to the positions that the first canvas has fewer than the
    answer may have. Positions that an end of text removes are not added to this number, as a region
    could then grow and shrink for ever. After the last expansion, and outside of infilling,
    `expand` is never predicted.
    """

    expand: int | None = None

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        size = sequence.model().spec.vocab_size
        if self.expand is not None and self.expand >= size:
            raise InvalidRequestError(
                f"expand={self.expand} must be below the vocabulary size {size}"
            )

    def expand_token(self, sequence: Sequence) -> int | None:
        """The given one, else the model's."""
        if self.expand is not None:
            return self.expand
        token: int | None = sequence.model().spec.expand_token
        return token

    def banned(self, sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
        """Whether `expand` may be predicted depends on the canvas, see `predictions`."""
        own = self.expand_token(sequence)
        return tuple(token for token in super().banned(sequence, canvas) if token != own)

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        super().begin(sequence, canvas)
        num_expansions = sequence.remaining - (len(canvas) - sequence.length)
        canvas.policy_state["expansions"] = num_expansions if canvas.is_fixed_length else 0

    def predictions(
        self, sequence: Sequence, canvas: Canvas, scores: Scores, rows: range | None = None
    ) -> Predictions:
        predictions = super().predictions(sequence, canvas, scores, rows)
        expand = self.expand_token(sequence)
        if expand is not None:
            if canvas.policy_state["expansions"] <= 0:
                predictions.scores.logits[:, expand] = -np.inf
        return predictions

    def finish_step(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: Iterable[int],
        **facts: Any,
    ) -> None:
        chosen = [int(position) for position in chosen]
        if canvas.is_fixed_length:
            for position in sorted(chosen, reverse=True):
                self._resize(sequence, canvas, position)
        super().finish_step(sequence, canvas, predictions, chosen, **facts)

    def _resize(self, sequence: Sequence, canvas: Canvas, position: int) -> None:
        if position >= len(canvas) or canvas.committed[position] == FIXED:
            return
        fixed = np.flatnonzero(canvas.committed[position:] == FIXED)
        token = int(canvas.tokens[position])
        if len(fixed) and sequence.stops_at(token):
            behind = self._ended(canvas, position, position + int(fixed[0]))
            for removed in (*behind[::-1].tolist(), position):
                canvas.splice(removed, removed + 1, 0)
        elif token == self.expand_token(sequence):
            # Several may be chosen in the step of the last expansion: the rest become masks again.
            can_expand = canvas.policy_state["expansions"] > 0
            canvas.policy_state["expansions"] -= can_expand
            canvas.splice(position, position + 1, 2 if can_expand else 1)

    @staticmethod
    def _ended(canvas: Canvas, position: int, stop: int) -> np.ndarray:
        """What an end of text at `position` removes up to `stop`, the end of its region."""
        return canvas.masked(position, stop)


@register(
    Card(
        "dream-coder",
        "diffusion",
        paper="Dream-Coder 7B: An Open Diffusion Language Model for Code (arXiv:2509.01142);"
        " DreamOn: Diffusion Language Models For Code Infilling Beyond Fixed-size Canvas"
        " (arXiv:2602.01326)",
        exactness="lossy",
        summary="Dream's decoder; infilled regions shrink and grow as needed.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "expansions in one step that would exceed max_tokens become masks again",
            "an end of text removes the masks behind it too, as an option of DreamOn's code does",
            "the temperature is the request's (0.1 in the paper)",
        ),
        bounds={"expand": Range(0, 1 << 20)},
        remote={"steps": Range(1, 4096), "expand": Range(1, 4096)},
    )
)
def dream_coder(
    steps: int | None = None, expand: int | None = None, mask: int | None = None
) -> Denoiser:
    """Denoises the whole canvas along a time grid, with infilling of variable length.

    Args:
        steps: The number of denoising steps (default: one per mask).
        expand: The token that is replaced by two masks (default: the model's, if its config names
            one, as DreamOn's does).
        mask: The mask token (default: the tokenizer's).
    """
    if expand is not None and expand < 0:
        raise InvalidRequestError(f"expand must be a token id of 0 or more, not {expand}")
    decoder = VariableInfilling(WholeCanvas(), Entropy(), TimeGrid(steps), mask=mask, tempered=True)
    decoder.expand = expand
    return decoder

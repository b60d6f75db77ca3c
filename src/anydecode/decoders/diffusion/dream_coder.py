"""Dream's sampler with infilling of variable length (Xie et al., "Dream-Coder 7B: An Open Diffusion
Language Model for Code", arXiv:2509.01142): masks that are not needed go, masks that are lacking
come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
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
    """In an infilled region that text follows, an end of text ends the region: what stands from it
    on goes. A token `expand` becomes two masks.

    A canvas may expand as often as it has fewer positions at first than the answer may have. What
    an end of text removes is not given back, or a region could grow and shrink for ever. After the
    last expansion, and outside of infilling, `expand` is never predicted.
    """

    expand: int | None = None

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        super().begin(sequence, canvas)
        room = sequence.remaining - (len(canvas) - sequence.length)
        canvas.memory["expansions"] = room if canvas.whole else 0

    def predictions(
        self, sequence: Sequence, canvas: Canvas, scores: Scores, rows: range | None = None
    ) -> Predictions:
        found = super().predictions(sequence, canvas, scores, rows)
        if self.expand is not None:
            logits = found.scores.logits
            if self.expand >= logits.shape[1]:
                raise InvalidRequestError(
                    f"expand={self.expand} is no token of this model, which has {logits.shape[1]}"
                )
            if canvas.memory["expansions"] <= 0:
                logits[:, self.expand] = -np.inf
        return found

    def settle(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: Iterable[int],
        **facts: Any,
    ) -> None:
        chosen = [int(position) for position in chosen]
        if canvas.whole:
            for position in sorted(chosen, reverse=True):
                self._resize(sequence, canvas, position)
        super().settle(sequence, canvas, predictions, chosen, **facts)

    def _resize(self, sequence: Sequence, canvas: Canvas, position: int) -> None:
        if position >= len(canvas) or canvas.committed[position] == FIXED:
            return
        behind = np.flatnonzero(canvas.committed[position:] == FIXED)
        token = int(canvas.tokens[position])
        if len(behind) and sequence.stops_at(token):
            canvas.splice(position, position + int(behind[0]), 0)
        elif token == self.expand:
            # Several may be chosen in the pass of the last expansion: the others are masks again.
            left = canvas.memory["expansions"] > 0
            canvas.memory["expansions"] -= left
            canvas.splice(position, position + 1, 2 if left else 1)


@register(
    Card(
        "dream-coder",
        "diffusion",
        paper="Dream-Coder 7B: An Open Diffusion Language Model for Code (arXiv:2509.01142)",
        exactness="lossy",
        summary="Dream's sampler; regions of an infilling shrink and grow as the text needs.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "expansions beyond the answer's room in one pass become masks again",
            "sampling temperature is the request's (the paper's: 0.1)",
        ),
    )
)
def dream_coder(
    steps: int | None = None, expand: int | None = None, mask: int | None = None
) -> Denoiser:
    """`steps` passes (default: as many as masks). `expand` is the token that stands for two masks,
    in models that were trained with one."""
    if expand is not None and expand < 0:
        raise InvalidRequestError("expand is a token, 0 or more")
    made = VariableInfilling(WholeCanvas(), Entropy(), TimeGrid(steps), mask=mask, tempered=True)
    made.expand = expand
    return made

"""Confident decoding, a prompt that is computed once, and structure priors (Yu et al., "Dimple:
Discrete Diffusion Multimodal Large Language Model with Parallel Decoding", arXiv:2505.16990)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import WholeCanvas
from anydecode.decoders.diffusion.caches import CachePolicy, NoCache, rows
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import ranking
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy, best
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span


class ConfidentElseGrid(UnmaskPolicy):
    """Every mask ranked above `least`; where there is none, as many as the next step of a time grid
    of `steps` (None: one per mask) that takes at least one away."""

    def __init__(self, least: float, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise InvalidRequestError("a canvas needs at least one step")
        self.least = least
        self.steps = steps

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        sure: np.ndarray = ranks > self.least
        return sure if sure.any() else best(ranks, self.quota(canvas, len(positions)))

    def quota(self, canvas: Canvas, masks: int) -> int:
        """How many of `masks` the schedule fills: a share 1 - s / r, where r is the share of the
        canvas that is masked and s the largest step of the grid below it that fills one."""
        steps = self.steps or canvas.block_masks
        r = masks / canvas.block_masks
        for step in range(1, steps):
            s = 1 - step / steps
            if s < r and int(masks * (1 - s / r) + 1e-9) >= 1:
                return int(masks * (1 - s / r) + 1e-9)
        return masks


class PromptOnce(CachePolicy):
    """The prompt sees itself only and is computed once; the canvas behind it in every pass."""

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        held = canvas.memory["start"] - canvas.shift
        if held <= 0 or context.length >= held:
            return []
        positions = np.arange(held, dtype=np.int32)
        span = rows(canvas, context, canvas.tokens, positions)
        span.visible, span.keep = np.minimum(span.visible, held), True
        return [span]

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        return rows(canvas, context, tokens, canvas.slice(canvas.memory["start"], len(canvas)))


class PriorDenoiser(Denoiser):
    """Writes `priors` (offset from the prompt's end: text or tokens) before the first pass."""

    priors: Mapping[int, str | list[int]] = {}

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        super().begin(sequence, canvas)
        for offset, text in self.priors.items():
            tokens = sequence.tokenizers[TARGET].encode(text) if isinstance(text, str) else text
            for position, token in enumerate(tokens, canvas.memory["start"] + int(offset)):
                if not canvas.memory["start"] <= position < len(canvas):
                    raise InvalidRequestError(
                        f"a prior stands at {position - canvas.memory['start']}, but the canvas has"
                        f" {len(canvas) - canvas.memory['start']} positions"
                    )
                if canvas.tokens[position] != token:
                    if canvas.tokens[position] != canvas.mask:
                        raise InvalidRequestError("two priors stand at one position")
                    canvas.fix(position, int(token))


@register(
    Card(
        "dimple",
        "diffusion",
        paper="Dimple (arXiv:2505.16990)",
        exactness="lossy",
        summary="All sure tokens of a pass, else a time grid's; the prompt once; fixed structure.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("text only: the paper's model also reads pictures",),
    )
)
def dimple(
    threshold: float = 0.95,
    steps: int | None = None,
    remasking: str = "confidence",
    prefill: bool = False,
    priors: Mapping[int, str | list[int]] | None = None,
    mask: int | None = None,
) -> Denoiser:
    """Commits what is ranked above `threshold`, else what a grid of `steps` passes does. `prefill`
    computes the prompt once, seeing itself only: exact for models trained so, else a further
    approximation. `priors` are texts fixed at offsets from the prompt's end."""
    made = PriorDenoiser(
        WholeCanvas(),
        ranking(remasking),
        ConfidentElseGrid(threshold, steps),
        PromptOnce() if prefill else NoCache(),
        mask=mask,
    )
    made.priors = priors or {}
    return made

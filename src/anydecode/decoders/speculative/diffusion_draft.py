"""Drafts from a diffusion model: masks behind the text, filled in one pass. What its methods share;
they differ in what they make of the masks' distributions."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.decoders.diffusion.canvas_spans import canvas_span, score_canvas
from anydecode.decoders.speculative.core import Drafter, DraftSession
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence


class DiffusionDrafter(Drafter):
    """Needs a model in the lane "draft" whose rows see both ways, and its mask token."""

    runners = (DRAFT,)
    draft_causal = False

    def prepare(self, sequence: Sequence) -> None:
        mask_of(sequence)


class DiffusionSession(DraftSession):
    """One pass of the draft model per round."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def marginals(self, count: int) -> Generator[DecoderAction, Any, list[np.ndarray]]:
        """Logits float32 `[vocab_size]` of each of the next `count` positions, the mask token's
        -inf. Every row is computed anew: what a diffusion model remembers of a text changes with
        what stands behind it."""
        sequence = self.sequence
        context = sequence.context(DRAFT)
        context.truncate(0)
        spec, mask = context.pool.model.spec, mask_of(sequence)
        known = sequence.all_tokens
        canvas = np.array(known + [mask] * count, np.int32)
        positions = np.arange(len(canvas), dtype=np.int32)
        size = spec.block_size or len(canvas)
        visible = np.minimum((positions // size + 1) * size, len(canvas)).astype(np.int32)
        wanted = np.arange(len(known), len(canvas))
        span = canvas_span(context, positions, canvas, visible)
        scores = yield score_canvas(sequence, DRAFT, [span], 1, wanted, spec.logit_shift)
        rows = []
        for row in scores.logits:
            masked = row.copy()
            masked[mask] = -np.inf
            rows.append(fitted(sequence, masked))
        return rows


def mask_of(sequence: Sequence) -> int:
    """The draft model's mask token. Raises `InvalidRequestError` where it has none."""
    mask: int | None = getattr(sequence.tokenizers.get(DRAFT), "mask_id", None)
    if mask is None:
        raise InvalidRequestError("the draft model's tokenizer has no mask token")
    return mask

"""Drafts from a diffusion model: masks after the text, predicted in one pass. Shared by the methods
that draft this way; they differ in how they use the distributions of the masks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.canvas_spans import canvas_span, score_canvas, visible_positions
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.speculation import Drafter, DraftSession
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence


class DiffusionDrafter(Drafter):
    """Base class of drafters with a bidirectional model as runner "draft". Its tokenizer must have
    a mask token."""

    requirements = Requirements(runners=(DRAFT,), draft_causal=False)

    def prepare(self, sequence: Sequence) -> None:
        draft_mask_token(sequence)


class DiffusionSession(DraftSession):
    """Runs one pass of the draft model per round."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def marginals(self, count: int) -> Generator[DecoderAction, Any, list[np.ndarray]]:
        """Return the logits of each of the next `count` positions, float32 `[vocab_size]`.

        The mask token has logit -inf. All rows are recomputed, since a diffusion model's keys and
        values of a text depend on the tokens after it.
        """
        sequence = self.sequence
        kv_cache = sequence.kv_cache(DRAFT)
        kv_cache.truncate(0)
        spec, mask = kv_cache.pool.model.spec, draft_mask_token(sequence)
        tokens = sequence.all_tokens
        canvas = np.array(tokens + [mask] * count, np.int32)
        positions = np.arange(len(canvas), dtype=np.int32)
        origin = len(tokens) if spec.has_causal_context or spec.has_prompt_block else 0
        context = origin if spec.has_causal_context else 0
        visible = visible_positions(positions, len(canvas), spec.block_size, origin, context)
        if spec.has_prompt_block:
            visible[:origin] = origin
        output_rows = np.arange(len(tokens), len(canvas))
        span = canvas_span(kv_cache, positions, canvas, visible)
        scores = yield score_canvas(sequence, DRAFT, [span], 1, output_rows, spec.logit_shift)
        rows = []
        for row in scores.logits:
            masked = row.copy()
            masked[mask] = -np.inf
            rows.append(fit_vocab(sequence, masked))
        return rows


def draft_mask_token(sequence: Sequence) -> int:
    """The draft model's mask token. Raises `InvalidRequestError` if it has none."""
    mask: int | None = getattr(sequence.tokenizers.get(DRAFT), "mask_id", None)
    if mask is None:
        raise InvalidRequestError("the draft model's tokenizer has no mask token")
    return mask

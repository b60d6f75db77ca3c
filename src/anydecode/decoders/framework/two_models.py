"""Decoding from two models side by side: every token is sampled from a row that is computed from
both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: From the target's logits and the other model's, float32 `[vocab_size]` of the target each, to the
#: logits of the next token.
Mix = Callable[[np.ndarray, np.ndarray], np.ndarray]

DRAFT = "draft"


def mixed_decoding(sequence: Sequence, mix: Mix) -> Decoding:
    """One token per pass of both models, which run at the same time."""
    while not sequence.finished:
        target, other = yield [sequence.score(), sequence.score(runner=DRAFT)]
        expert = target.row(-1)
        row = mix(expert, fitted(other.row(-1), len(expert)))
        sampler, position = sequence.sampler, sequence.length
        target.show_hidden(sampler, -1)
        token = sequence.sample(sampler, row, position)
        sequence.record_logprobs(row, position, token, sampler)
        sequence.emit([token])


def fitted(logits: np.ndarray, size: int) -> np.ndarray:
    """`logits` with `size` entries, all finite: what is missing has the smallest finite one. The
    vocabularies of two models may end in different numbers of unused tokens."""
    smallest = logits[np.isfinite(logits)].min()
    result = np.full(size, smallest, np.float32)
    count = min(size, len(logits))
    np.maximum(logits[:count], smallest, out=result[:count])
    return result

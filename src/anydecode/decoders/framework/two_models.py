"""Decoding from two models: every token is sampled from a row that is computed from both, or from
the row of one of them."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence

#: From the target's logits and the other model's, float32 `[vocab_size]` of the target each, to the
#: logits of the next token.
Mix = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mixed_decoding(sequence: Sequence, mix: Mix) -> Decoding:
    """One token per pass of both models, which run at the same time."""
    while not sequence.finished:
        target, other = yield [sequence.score(), sequence.score(runner=DRAFT)]
        expert = target.row(-1)
        row = mix(expert, fitted(other.row(-1), len(expert)))
        target.show_hidden(sequence.sampler, -1)
        emit_sampled(sequence, row)


def next_row(sequence: Sequence, runner: str) -> Generator[DecoderAction, ActionResult, np.ndarray]:
    """The logits of the next token by the model of `runner`, float32 `[vocab_size]` of the target.
    The model reads the tokens that it has missed in the same pass."""
    scores = yield sequence.score(runner=runner)
    row: np.ndarray = scores.row(-1)
    if runner != TARGET:
        size = sequence.model().spec.vocab_size
        row = fitted(row, size, missing=-np.inf)
    return row


def emit_sampled(sequence: Sequence, row: np.ndarray) -> None:
    """Sample the next token from its logits float32 `[vocab_size]`, and emit it."""
    sampler, position = sequence.sampler, sequence.length
    token = sequence.sample(sampler, row, position)
    sequence.record_logprobs(row, position, token, sampler)
    sequence.emit([token])


def refuse_guidance(sequence: Sequence, key: str) -> None:
    """Refuse what reads more of the target than its last row, which `key` cannot do in the other
    model too."""
    sampler = sequence.sampler
    if sequence.companion_prompts or sampler.capture_layers or sampler.observes_hidden:
        raise UnsupportedCombinationError(
            f"{key} does not work with guidance or with samplers that read hidden states: the draft"
            " model has neither"
        )


def fitted(logits: np.ndarray, size: int, missing: float | None = None) -> np.ndarray:
    """`logits` with `size` entries. The vocabularies of two models may end in different numbers of
    unused tokens: what is missing has the logit `missing`; by default it and all entries that are
    -inf have the smallest finite one."""
    if missing is not None and len(logits) == size:
        return logits
    smallest = logits[np.isfinite(logits)].min() if missing is None else np.float32(missing)
    result = np.full(size, smallest, np.float32)
    count = min(size, len(logits))
    np.maximum(logits[:count], smallest, out=result[:count])
    return result

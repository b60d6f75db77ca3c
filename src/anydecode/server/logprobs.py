"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from typing import Any

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.scoring.sequence import Sequence

#: What stands for minus infinity, which JSON lacks.
FLOOR = -9999.0


def said(sequence: Sequence, start: int = 0) -> list[TokenLogprobs]:
    """The notes of a sequence's tokens from `start` on, without the token that only ends it and
    without those of earlier calls that this one resumed."""
    notes = list(sequence.logprobs[max(start, sequence.state.get("resumed", 0)) :])
    if None in notes:
        raise UnsupportedCombinationError("this decoder gives no log-probabilities")
    if notes and sequence.finished and sequence.stops_at(notes[-1].token):
        notes.pop()
    return notes


def chat_entries(notes: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For chat: token, bytes and alternatives, one entry per token."""
    return [
        {
            **_entry(note.token, note.logprob, tokenizer),
            "top_logprobs": [_entry(token, value, tokenizer) for token, value in note.top],
        }
        for note in notes
    ]


def completion_lists(
    notes: list[TokenLogprobs], tokenizer: Tokenizer, offset: int = 0
) -> dict[str, list[Any]]:
    """For completions: lists side by side; `offset` is where the text begins, in characters."""
    tokens = [_text(note.token, tokenizer) for note in notes]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(note.logprob) for note in notes],
        "top_logprobs": [
            {_text(token, tokenizer): _finite(value) for token, value in note.top} for note in notes
        ],
        "text_offset": offsets,
    }


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": _text(token, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _text(token: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace") if data else tokenizer.token_text(token)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR

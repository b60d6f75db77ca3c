"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from anydecode.engine.text import Detokenizer
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.scoring.sequence import Sequence

#: What stands for minus infinity, which JSON lacks.
FLOOR = -9999.0


def said(sequence: Sequence, start: int = 0) -> list[TokenLogprobs]:
    """The notes of a sequence's tokens from `start` on, without the token that only ends it and
    without those of earlier calls that this one resumed."""
    notes = present(sequence.logprobs[max(start, sequence.state.get("resumed", 0)) :])
    if notes and sequence.finished and sequence.stops_at(notes[-1].token):
        notes.pop()
    return notes


def present(notes: list[TokenLogprobs | None]) -> list[TokenLogprobs]:
    """`notes`, of which none may be missing."""
    found = [note for note in notes if note is not None]
    if len(found) < len(notes):
        raise UnsupportedCombinationError("this decoder gives no log-probabilities")
    return found


def chat_entries(notes: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For chat: token, bytes and alternatives, one entry per token."""
    return [
        {
            **_entry(note.token, note.logprob, tokenizer),
            "top_logprobs": [_entry(token, value, tokenizer) for token, value in note.top],
        }
        for note in notes
    ]


class CompletionLists:
    """For completions: lists side by side, of tokens as they come. The text begins with `echo`, the
    text of the prompt, or behind it."""

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = len(echo)

    def of_prompt(self, prompt: list[int], notes: list[TokenLogprobs | None]) -> dict[str, Any]:
        """The lists of a prompt's tokens; the first has no log-probability."""
        detokenizer = Detokenizer(self._tokenizer)
        lengths = [len(detokenizer.push(token)) for token in prompt]
        offset = len(self._echo) - sum(lengths) - len(detokenizer.flush())
        offsets = []
        for length in lengths:  # the text may lack a space that the first token begins with
            offsets.append(max(0, offset))
            offset += length
        return self._lists(prompt, notes, offsets)

    def of_answer(self, notes: list[TokenLogprobs]) -> dict[str, Any]:
        """The lists of the tokens that come next."""
        offsets = []
        for note in notes:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(note.token))
        return self._lists([note.token for note in notes], notes, offsets)

    def _lists(
        self, tokens: list[int], notes: Iterable[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        notes = list(notes)
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if note is None else _finite(note.logprob) for note in notes],
            "top_logprobs": [None if note is None else self._top(note) for note in notes],
            "text_offset": offsets,
        }

    def _top(self, note: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the token itself; of tokens alike in text, the first."""
        found: dict[str, float] = {}
        for token, value in (*note.top, (note.token, note.logprob)):
            found.setdefault(self._name(token), _finite(value))
        return found

    def _name(self, token: int) -> str:
        """A token's text; its bytes, as OpenAI writes them, where they are no whole characters."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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

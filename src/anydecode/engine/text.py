"""From tokens to text while they come: characters only whole, and an end where a rule says so."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """Text as tokens come. A character whose bytes are not all there yet is held back; bytes that
    can no longer become a character turn into U+FFFD, just as when all are decoded at once."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def push(self, token: int) -> str:
        """The whole characters that `token` completes."""
        return self._decode(self._tokenizer.token_bytes(token), final=False)

    def flush(self) -> str:
        """What is left of an unfinished character: one U+FFFD, or nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if not data and not (final and self._pending):
            return ""
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text


class OutputProcessor:
    """Takes tokens one by one, keeps the text, and says when and why the answer ends.

    - An end-of-text token (unless `ignore_eos`) or one of `stop_tokens` ends it: "stop". The token
      is taken; its text is left out unless `include_stop`.
    - A stop string ends it: "stop". The text ends before the string (behind it with
      `include_stop`) although the tokens include those that produced it. The string completed by
      the earliest character counts, of several the one that began first. Strings completed within
      the first `min_tokens` tokens do not count.
    - `max_tokens` tokens end it: "length".

    Text that could still become a stop string is held back by `take` until it cannot. The work
    per token depends on the length of the stop strings, never on the length of the text. All state
    is plain data; the same tokens pushed again into new rules rebuild it.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop_strings: Sequence[str] = (),
        stop_tokens: Iterable[int] = (),
        eos_ids: Iterable[int] = (),
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._strings = tuple(stop_strings)
        self._ends = frozenset(stop_tokens) | frozenset(() if ignore_eos else eos_ids)
        self._max_tokens = max_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._strings), default=1) - 1
        self._parts: list[str] = []
        self._taken = 0  # how many parts `take` has handed out
        self._held = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stopped_by: str | int | None = None  # the stop string or token that ended the answer

    @property
    def text(self) -> str:
        """All text so far, except what is held back."""
        return "".join(self._parts)

    @property
    def has_text(self) -> bool:
        """Whether `take` would give something."""
        return self._taken < len(self._parts)

    @property
    def remaining(self) -> int:
        """How many tokens may still be taken."""
        return 1 << 31 if self._max_tokens is None else self._max_tokens - self.num_tokens

    def take(self) -> str:
        """The text that has become certain since the last call."""
        stop = len(self._parts)  # another thread may be adding to them
        fresh = "".join(self._parts[self._taken : stop])
        self._taken = stop
        return fresh

    def stops_at(self, token: int) -> bool:
        """Whether `token` by itself ends the answer, whatever came before."""
        return token in self._ends

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that end the answer; None where strings may do so too."""
        return None if self._strings else self._ends

    def push(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """How many of `tokens` were taken, and the finish reason if they ended the answer."""
        for taken, token in enumerate(tokens):
            if self.finish_reason is not None:
                return taken, self.finish_reason
            self._push(token)
        return len(tokens), self.finish_reason

    def _push(self, token: int) -> None:
        self.num_tokens += 1
        end_tokens = token in self._ends
        if not end_tokens or self._include_stop:
            self._emit(self._detokenizer.push(token))
        if end_tokens:
            self._finish("stop", token)
        elif self.num_tokens == self._max_tokens:
            self._finish("length", None)

    def _finish(self, reason: str, stopped_by: int | None) -> None:
        if self.finish_reason is None:
            self._emit(self._detokenizer.flush())
        if self.finish_reason is None:
            self._append(self._held)
            self._held = ""
            self.finish_reason, self.stopped_by = reason, stopped_by

    def _emit(self, text: str) -> None:
        if not text:
            return
        if not self._strings:
            self._append(text)
            return
        text, known = self._held + text, len(self._held)
        if self.num_tokens > self._min_tokens:
            found = [(text.find(s, max(0, known + 1 - len(s))), s) for s in self._strings]
            end_tokens = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
            if end_tokens:
                end, at, stop = min(end_tokens)
                self._append(text[: end if self._include_stop else at])
                self._held = ""
                self.finish_reason, self.stopped_by = "stop", stop
                return
        kept = self._overlap(text)
        self._append(text[: len(text) - kept])
        self._held = text[len(text) - kept :]

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins, but does not complete, a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._strings):
                return length
        return 0

"""Incremental detokenization and stop rules."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Protocol

from anydecode.constraints.vocabulary import vocabulary
from anydecode.models.tokenizer import Tokenizer


class TokenBytes(Protocol):
    """The part of a tokenizer that detokenization needs."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token; may end inside a character."""
        ...


class Detokenizer:
    """Decodes tokens incrementally. Incomplete characters are held back; bytes that cannot become a
    character give U+FFFD, exactly as when all bytes are decoded at once."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        return self._decode(self._tokenizer.token_bytes(token), final=False)

    def flush(self) -> str:
        """The rest at the end of the text: one U+FFFD for an incomplete character, or nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if not data and not (final and self._pending):
            return ""
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text


def completing_tokens(
    tokenizer: Tokenizer, size: int, stop_strings: Iterable[str]
) -> frozenset[int] | None:
    """The tokens, of logits of width `size`, that may complete a stop string; None if any may: an
    invalid byte becomes U+FFFD only with the next token."""
    stops = list(stop_strings)
    if any("\ufffd" in stop for stop in stops):
        return None
    if not stops:
        return frozenset()
    return vocabulary(tokenizer, size).tokens_completing(stop.encode() for stop in stops)


class OutputProcessor:
    """Collects the text of the generated tokens and applies the stop rules.

    - An end-of-text token (unless `ignore_eos`) or one of `stop_tokens` ends the generation with
      "stop". The token is taken; its text is left out unless `include_stop`.
    - A stop string ends it with "stop". The text ends before the string (after it with
      `include_stop`), although the tokens include those that produced it. The string that is
      complete first counts, of several the one that begins first. Strings completed within the
      first `min_tokens` tokens do not count.
    - `max_tokens` tokens end it with "length".

    Text that may still become part of a stop string is held back by `take`. The work per token
    depends on the length of the stop strings, not on the length of the text. All state is plain
    data, and pushing the same tokens into a new object rebuilds it.

    Args:
        tokenizer: Gives the bytes of each token.
        stop_strings: Texts that end the generation.
        stop_tokens: Token ids that end the generation.
        eos_ids: End-of-text token ids of the tokenizer.
        max_tokens: Maximum number of tokens, or None.
        ignore_eos: Whether end-of-text tokens are treated as ordinary tokens.
        include_stop: Whether the text includes the stop token or string.
        min_tokens: Number of tokens within which stop strings are ignored.
        completing: The tokens that may complete a stop string (`completing_tokens`); None: any.

    Attributes:
        num_tokens: Number of tokens taken.
        finish_reason: "stop" or "length" once the generation has ended, else None.
        stopped_by: The stop string or token that ended the generation, or None.
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
        completing: frozenset[int] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = tuple(stop_strings)
        self._end_tokens = frozenset(stop_tokens) | frozenset(() if ignore_eos else eos_ids)
        self._possible_ends: frozenset[int] | None = self._end_tokens
        if self._stop_strings:
            self._possible_ends = None if completing is None else self._end_tokens | completing
        self._max_tokens = max_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._max_overlap = max(map(len, self._stop_strings), default=1) - 1
        self._parts: list[str] = []
        self._num_taken = 0  # how many parts `take` has returned
        self._held_back = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stopped_by: str | int | None = None

    @property
    def text(self) -> str:
        """All text so far, except what is held back by `take`."""
        return "".join(self._parts)

    @property
    def has_text(self) -> bool:
        """Whether `take` would return text."""
        return self._num_taken < len(self._parts)

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return 1 << 31 if self._max_tokens is None else self._max_tokens - self.num_tokens

    def take(self) -> str:
        """The text that has become final since the last call."""
        stop = len(self._parts)  # another thread may be appending
        text = "".join(self._parts[self._num_taken : stop])
        self._num_taken = stop
        return text

    def stops_at(self, token: int) -> bool:
        """Whether `token` ends the generation whatever the text before it."""
        return token in self._end_tokens

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that may end the generation; None if any may, by a stop string."""
        return self._possible_ends

    def push(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Append tokens. Returns how many were taken, and the finish reason if one of them ended
        the generation."""
        for taken, token in enumerate(tokens):
            if self.finish_reason is not None:
                return taken, self.finish_reason
            self._push(token)
        return len(tokens), self.finish_reason

    def end(self, reason: str) -> None:
        """End the generation for `reason`, which is none of the stop rules."""
        self._finish(reason, None)

    def with_limit(self, max_tokens: int) -> OutputProcessor:
        """A copy that takes at most `max_tokens` tokens. Copies share the stop rules."""
        other = self.fork()
        other._max_tokens = max_tokens
        return other

    def fork(self) -> OutputProcessor:
        """A copy that can be pushed to on its own."""
        other = copy(self)
        other._detokenizer = copy(self._detokenizer)
        other._parts = list(self._parts)
        return other

    def _push(self, token: int) -> None:
        self.num_tokens += 1
        is_end = token in self._end_tokens
        if not is_end or self._include_stop:
            self._emit(self._detokenizer.push(token))
        if is_end:
            self._finish("stop", token)
        elif self.num_tokens == self._max_tokens:
            self._finish("length", None)

    def _finish(self, reason: str, stopped_by: int | None) -> None:
        if self.finish_reason is None:
            self._emit(self._detokenizer.flush())
        if self.finish_reason is None:
            self._append(self._held_back)
            self._held_back = ""
            self.finish_reason, self.stopped_by = reason, stopped_by

    def _emit(self, text: str) -> None:
        if not text:
            return
        if not self._stop_strings:
            self._append(text)
            return
        text, num_searched = self._held_back + text, len(self._held_back)
        if self.num_tokens > self._min_tokens:
            found = [
                (text.find(s, max(0, num_searched + 1 - len(s))), s) for s in self._stop_strings
            ]
            matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
            if matches:
                end, start, stop = min(matches)
                self._append(text[: end if self._include_stop else start])
                self._held_back = ""
                self.finish_reason, self.stopped_by = "stop", stop
                return
        overlap = self._overlap(text)
        self._append(text[: len(text) - overlap])
        self._held_back = text[len(text) - overlap :]

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for length in range(min(self._max_overlap, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop_strings):
                return length
        return 0

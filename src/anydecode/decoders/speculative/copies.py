"""An n-gram index of a token history: finds earlier occurrences of the last tokens and what
followed them.

It costs about a microsecond per token, so it can be kept even when nothing is drafted from it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

#: The n-gram sizes looked up, longest first. A match is extended up to `MAX_MATCH_LENGTH` tokens.
NGRAM_SIZES = (4, 2, 1)
MAX_MATCH_LENGTH = 20
#: Separates texts; no token has this id.
SEPARATOR = -1


class TokenHistory:
    """A growing token sequence and the last end of each n-gram of `NGRAM_SIZES` in it. An n-gram is
    indexed once a token follows it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._fourgrams: dict[tuple[int, int, int, int], int] = {}
        self._bigrams: dict[tuple[int, int], int] = {}
        self._unigrams: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Append one token."""
        tokens = self.tokens
        end = len(tokens)
        if end:
            last = tokens[-1]
            self._unigrams[last] = end
            if end > 1:
                before = tokens[-2]
                self._bigrams[before, last] = end
                if end > 3:
                    self._fourgrams[tokens[-4], tokens[-3], before, last] = end
        tokens.append(token)

    def find(self, text: Seq[int]) -> tuple[int, int]:
        """Find the latest occurrence of the longest n-gram that ends `text`.

        Returns:
            The position after the occurrence, and the number of tokens before that position that
                equal the end of `text`; (0, 0) if there is none.
        """
        size = len(text)
        unigram_end = self._unigrams.get(text[-1]) if size else None
        if unigram_end is None:
            return 0, 0
        end = self._bigrams.get((text[-2], text[-1])) if size > 1 else None
        if end is None:
            return unigram_end, 1
        if size > 3:
            end = self._fourgrams.get((text[-4], text[-3], text[-2], text[-1]), end)
        tokens, length = self.tokens, 2
        max_length = min(end, size, MAX_MATCH_LENGTH)
        while length < max_length and tokens[end - 1 - length] == text[-1 - length]:
            length += 1
        return end, length


class MatchCursor:
    """Follows one text through a history: the last `length` tokens of the text equal the tokens
    right before `position` in the history."""

    def __init__(self, history: TokenHistory) -> None:
        self.history = history
        self.position = 0
        self.length = 0

    @property
    def prediction(self) -> int:
        """The token of the history that follows the match; `SEPARATOR` if nothing matches."""
        tokens = self.history.tokens
        return tokens[self.position] if self.length and self.position < len(tokens) else SEPARATOR

    def step(self, text: Seq[int]) -> None:
        """Move on by one token: `text` is the text with its new last token."""
        if self.prediction == text[-1]:
            self.position += 1
            self.length += 1
            if self.length >= NGRAM_SIZES[0]:
                return
        else:
            self.length = 0
        position, length = self.history.find(text)
        if length > self.length:
            self.position, self.length = position, length

    def advanced(self, text: Seq[int], tokens: Seq[int]) -> MatchCursor:
        """A cursor that has moved on as if `text` were followed by `tokens`."""
        other = MatchCursor(self.history)
        other.position, other.length = self.position, self.length
        text = list(text[-MAX_MATCH_LENGTH:])
        for token in tokens:
            text.append(token)
            other.step(text)
        return other

    def chain(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the match. If the match reaches the end of the
        history, the text is periodic and the chain repeats the period."""
        if not self.length:
            return []
        tokens = self.history.tokens[self.position : self.position + count]
        period = len(tokens)
        while 0 < len(tokens) < count:
            tokens.append(tokens[len(tokens) - period])
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

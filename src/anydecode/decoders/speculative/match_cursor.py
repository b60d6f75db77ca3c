"""A cursor that follows one text through a token history and copies what came after the match."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.decoders.framework.ngram_index import SEPARATOR, NgramIndex

#: The n-gram sizes of the histories that cursors follow. A match is extended up to
#: `MAX_MATCH_LENGTH` tokens.
NGRAM_SIZES = (4, 2, 1)
MAX_MATCH_LENGTH = 20


class MatchCursor:
    """Follows one text through a history: the last `length` tokens of the text equal the tokens
    right before `position` in the history, an index of `NGRAM_SIZES`."""

    def __init__(self, history: NgramIndex) -> None:
        self.history = history
        self.position = 0
        self.length = 0

    def step(self, text: Seq[int]) -> bool | None:
        """Move on by one token: `text` is the text with its new last token.

        Returns:
            Whether the new token equals the one that followed the match; None if nothing matched,
                or nothing followed.
        """
        tokens, length, is_hit = self.history.tokens, self.length, None
        if length:
            predicted = tokens[self.position] if self.position < len(tokens) else SEPARATOR
            if predicted == text[-1]:
                self.position += 1
                self.length = length = length + 1
                if length >= NGRAM_SIZES[0]:
                    return True
                is_hit = True
            else:
                self.length = 0
                is_hit = None if predicted == SEPARATOR else False
        self.search(text)
        return is_hit

    def search(self, text: Seq[int]) -> None:
        """Move to the last occurrence of the end of `text`, if the match there is longer."""
        tokens = self.history.tokens
        position, found = self.history.find(text)
        if found > 1:
            max_length = min(position, len(text), MAX_MATCH_LENGTH)
            while found < max_length and tokens[position - 1 - found] == text[-1 - found]:
                found += 1
        if found > self.length:
            self.position, self.length = position, found

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

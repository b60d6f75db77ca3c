"""An index of repetitions: where the last few tokens stood before, and what followed them there.

It costs about a microsecond per token, so that it can be kept whether or not anybody drafts from
it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

#: The n-grams looked up, longest first. A match is as long as the texts agree, up to `LONGEST`.
GRAMS = (4, 2, 1)
LONGEST = 20
#: Stands between texts; no token has this id.
SEPARATOR = -1


class TokenHistory:
    """A growing text and where each n-gram of `GRAMS` last ended in it. An n-gram counts once
    something follows it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._four: dict[tuple[int, int, int, int], int] = {}
        self._two: dict[tuple[int, int], int] = {}
        self._one: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Lengthen the text by one token."""
        tokens = self.tokens
        end = len(tokens)
        if end:
            last = tokens[-1]
            self._one[last] = end
            if end > 1:
                before = tokens[-2]
                self._two[before, last] = end
                if end > 3:
                    self._four[tokens[-4], tokens[-3], before, last] = end
        tokens.append(token)

    def find(self, text: Seq[int]) -> tuple[int, int]:
        """Behind the latest place of the longest n-gram that ends `text`, and for how many tokens
        the text before that place is the end of `text`. (0, 0): none."""
        size = len(text)
        one = self._one.get(text[-1]) if size else None
        if one is None:
            return 0, 0
        end = self._two.get((text[-2], text[-1])) if size > 1 else None
        if end is None:
            return one, 1
        if size > 3:
            end = self._four.get((text[-4], text[-3], text[-2], text[-1]), end)
        tokens, length = self.tokens, 2
        most = min(end, size, LONGEST)
        while length < most and tokens[end - 1 - length] == text[-1 - length]:
            length += 1
        return end, length


class MatchCursor:
    """Follows one text through a corpus: `length` of its last tokens stand right before `at`."""

    def __init__(self, corpus: TokenHistory) -> None:
        self.corpus = corpus
        self.at = 0
        self.length = 0

    @property
    def guess(self) -> int:
        """What followed there; `SEPARATOR` if nothing matches."""
        tokens = self.corpus.tokens
        return tokens[self.at] if self.length and self.at < len(tokens) else SEPARATOR

    def step(self, text: Seq[int]) -> None:
        """The text has gone on: `text` with its last token is what it is now."""
        if self.guess == text[-1]:
            self.at += 1
            self.length += 1
            if self.length >= GRAMS[0]:
                return
        else:
            self.length = 0
        at, length = self.corpus.find(text)
        if length > self.length:
            self.at, self.length = at, length

    def ahead(self, text: Seq[int], tokens: Seq[int]) -> MatchCursor:
        """Where this follower would be if `text` went on with `tokens`."""
        other = MatchCursor(self.corpus)
        other.at, other.length = self.at, self.length
        text = list(text[-LONGEST:])
        for token in tokens:
            text.append(token)
            other.step(text)
        return other

    def chain(self, count: int) -> list[int]:
        """Up to `count` tokens that followed. Where the match reaches to the end of the corpus the
        text repeats itself, and so does the chain."""
        if not self.length:
            return []
        found = self.corpus.tokens[self.at : self.at + count]
        period = len(found)
        while 0 < len(found) < count:
            found.append(found[len(found) - period])
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

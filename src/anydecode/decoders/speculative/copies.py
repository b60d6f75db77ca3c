"""An index of repetitions: where the last few tokens stood before, and what followed them there.

It costs a few microseconds per token, so that it can be kept whether or not anybody drafts from it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

#: The longest n-gram looked up. A match once found grows without limit.
LONGEST = 6
#: Stands between texts; no token has this id.
BREAK = -1


class Corpus:
    """A growing text and where each n-gram, n = 1 to `LONGEST`, last ended in it. An n-gram counts
    once something follows it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST)]
        self._longest_first = self._ends[::-1]

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Lengthen the text by one token."""
        tokens = self.tokens
        tail = tuple(tokens[-LONGEST:])
        end = len(tokens)
        for ends in self._longest_first[LONGEST - len(tail) :]:
            ends[tail] = end
            tail = tail[1:]
        tokens.append(token)

    def find(self, tail: Seq[int], above: int) -> tuple[int, int]:
        """Behind the latest place of the longest n-gram that ends `tail`, and its n; only matches
        longer than `above` count. (0, 0): none."""
        size = min(LONGEST, len(tail))
        last = tuple(tail[-size:])
        for n in range(size, above, -1):
            end = self._ends[n - 1].get(last[size - n :])
            if end is not None:
                return end, n
        return 0, 0


class Follower:
    """Follows one text through a corpus: `length` of its last tokens stand right before `at`."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.at = 0
        self.length = 0

    @property
    def guess(self) -> int:
        """What followed there; `BREAK` if nothing matches."""
        tokens = self.corpus.tokens
        return tokens[self.at] if self.length and self.at < len(tokens) else BREAK

    def step(self, token: int, tail: Seq[int]) -> None:
        """The text, whose last tokens are `tail`, has gone on with `token`."""
        if self.guess == token:
            self.at += 1
            self.length += 1
        else:
            self.length = 0
        if self.length < LONGEST:
            at, length = self.corpus.find(tail, self.length)
            if length:
                self.at, self.length = at, length

    def chain(self, count: int) -> list[int]:
        """Up to `count` tokens that followed. Where the match reaches to the end of the corpus the
        text repeats itself, and so does the chain."""
        if not self.length:
            return []
        found = self.corpus.tokens[self.at : self.at + count]
        period = len(found)
        while 0 < len(found) < count:
            found.append(found[len(found) - period])
        return found[: found.index(BREAK)] if BREAK in found else found

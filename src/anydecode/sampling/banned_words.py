"""Banned token sequences, indexed by the tokens before the last of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.sampling.bias import forbid
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.history import History
from anydecode.sampling.processor import LogitsProcessor

_TOKEN = np.dtype(">i4")
_IDS = np.iinfo(np.int32)


class BannedWordTable(Sequence[Sequence[int]]):
    """Token sequences that must not be generated, without duplicates, in an order of its own.

    It is built once for all samples of a request, and has few objects for many words, so that it
    passes quickly from one process to another.

    Args:
        words: Sequences of token ids.

    Attributes:
        ids: The smallest and the largest token id; empty without words.
        lookback: The number of tokens of a text on which it depends what is banned next.

    Raises:
        InvalidRequestError: A word is empty, or a token id has more than 32 bits.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        pairs: set[tuple[bytes, int]] = set()
        for word in words:
            if not len(word):
                raise InvalidRequestError("banned_words contains an empty word")
            if min(word) < _IDS.min or max(word) > _IDS.max:
                raise InvalidRequestError("banned_words contains a token id of more than 32 bits")
            *before, last = word
            pairs.add((np.array(before[::-1], _TOKEN).tobytes(), int(last)))
        #: The tokens before the last ones of words, from the last to the first of them, ascending.
        self._starts: list[bytes] = []
        bounds: list[int] = []
        for index, (start, _) in enumerate(ordered := sorted(pairs)):
            if not self._starts or start != self._starts[-1]:
                self._starts.append(start)
                bounds.append(index)
        #: The last tokens of the words with the start `i` are those from `_bounds[i]` to the next.
        self._bounds = [*bounds, len(pairs)]
        self._last = np.array([last for _, last in ordered], np.int32)
        ids = np.concatenate([self._last, np.frombuffer(b"".join(self._starts), _TOKEN)])
        self.ids: tuple[int, ...] = (int(ids.min()), int(ids.max())) if len(ids) else ()
        #: For every start, the longest other one that it begins with; -1 for none.
        self._parents: list[int] = []
        for index, start in enumerate(self._starts):
            parent = index - 1
            while parent >= 0 and not start.startswith(self._starts[parent]):
                parent = self._parents[parent]
            self._parents.append(parent)
        self.lookback = max(map(len, self._starts), default=0) // _TOKEN.itemsize

    def __len__(self) -> int:
        return len(self._last)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._starts[bisect_right(self._bounds, index) - 1]
        return [*np.frombuffer(start, _TOKEN)[::-1].tolist(), int(self._last[index])]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BannedWordTable):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def next_banned(self, text: np.ndarray) -> np.ndarray:
        """The tokens that would complete a word, ascending.

        Args:
            text: int32 ids, at least the last `lookback` of the text if it has so many.

        Returns:
            int32 ids.
        """
        recent = text[max(0, len(text) - self.lookback) :][::-1].astype(_TOKEN).tobytes()
        # The starts with which `recent` begins are the start before its place in the order, or
        # among those that this one begins with.
        row = bisect_right(self._starts, recent) - 1
        while row >= 0 and not recent.startswith(self._starts[row]):
            row = self._parents[row]
        found: list[np.ndarray] = []
        while row >= 0:
            found.append(self._last[self._bounds[row] : self._bounds[row + 1]])
            row = self._parents[row]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate(found)) if found else self._last[:0]


class BannedWords(LogitsProcessor):
    """Bans token sequences from the output: the last token of each is forbidden after the others.
    The end of the prompt counts."""

    is_stateful = True

    def __init__(self, words: Iterable[Sequence[int]], prompt: Sequence[int] = ()) -> None:
        self._table = words if isinstance(words, BannedWordTable) else BannedWordTable(words)
        self._history = History(prompt[max(0, len(prompt) - self._table.lookback) :])

    def apply(self, candidates: Candidates) -> Candidates:
        return forbid(candidates, self._table.next_banned(self._history.tokens))

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> BannedWords:
        branch = object.__new__(BannedWords)
        branch._table, branch._history = self._table, self._history.fork()
        return branch

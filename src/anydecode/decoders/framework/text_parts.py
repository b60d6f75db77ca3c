"""Earlier texts in parts, within a number of bytes, from which drafts are copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

#: Texts are kept in this many parts, the oldest of which is dropped when memory is full.
NUM_PARTS = 8
#: Tokens are appended together, one for each so many bytes of memory: far less than a part.
_BYTES_PER_TOKEN = 1 << 17


class TextPart(Protocol):
    """A growing text that can be searched."""

    @property
    def num_bytes(self) -> int:
        """The estimated memory, in bytes."""
        ...

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text."""
        ...


P = TypeVar("P", bound=TextPart)


class TextParts(Generic[P]):
    """The parts of a growing text, the oldest first, of up to `memory` bytes. When these are full,
    the oldest part is dropped: about one eighth of the tokens.

    Args:
        memory: Maximum estimated memory, in bytes.
        make: Returns an empty part.
    """

    def __init__(self, memory: int, make: Callable[[], P]) -> None:
        self.memory = memory
        self.parts: deque[P] = deque()
        self._make = make
        self._earlier_bytes = 0  # of all parts but the last

    @property
    def num_bytes(self) -> int:
        """The estimated memory, in bytes."""
        return self._earlier_bytes + (self.parts[-1].num_bytes if self.parts else 0)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text."""
        parts, text = self.parts, list(tokens)
        count = max(1, self.memory // _BYTES_PER_TOKEN)
        for first in range(0, len(text), count):
            if not parts or parts[-1].num_bytes * NUM_PARTS >= self.memory:
                self._earlier_bytes = self.num_bytes
                parts.append(self._make())
            parts[-1].extend(text[first : first + count])
            while self.num_bytes > self.memory:
                dropped = parts.popleft()
                self._earlier_bytes -= dropped.num_bytes if parts else self._earlier_bytes

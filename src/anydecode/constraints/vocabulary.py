"""A tokenizer's tokens by their bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from anydecode.models.tokenizer import Tokenizer


class Vocabulary:
    """`pieces[token]` are a token's bytes, empty for special tokens and beyond the tokenizer's own
    up to `size`, the width of the logits."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        own = min(size, tokenizer.vocab_size)
        self.size = size
        self.pieces = [tokenizer.token_bytes(token) for token in range(own)] + [b""] * (size - own)
        self._order = sorted(range(own), key=lambda token: (self.pieces[token], token))
        self._sorted = [self.pieces[token] for token in self._order]

    def beginning(self, begun: bytes) -> Iterator[int]:
        """Tokens whose bytes begin with `begun` (not empty), shortest first among equal ones."""
        at = bisect_left(self._sorted, begun)
        while at < len(self._sorted) and self._sorted[at].startswith(begun):
            yield self._order[at]
            at += 1

    def goes_on(self, begun: bytes) -> bool:
        """Whether a longer token begins with `begun`."""
        at = bisect_right(self._sorted, begun)
        return at < len(self._sorted) and self._sorted[at].startswith(begun)

    def spelling(self, piece: bytes) -> Iterator[int]:
        """Tokens whose bytes are `piece` (not empty)."""
        for token in self.beginning(piece):
            if len(self.pieces[token]) > len(piece):
                return
            yield token

    def spelled(self, text: bytes) -> list[int] | None:
        """`text` as tokens, the longest first; None where it cannot be spelled so."""
        tokens: list[int] = []
        while text:
            found = next(
                (
                    token
                    for length in range(len(text), 0, -1)
                    for token in self.spelling(text[:length])
                ),
                None,
            )
            if found is None:
                return None
            tokens.append(found)
            text = text[len(self.pieces[found]) :]
        return tokens


_known: WeakKeyDictionary[Tokenizer, dict[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The vocabulary of `tokenizer` for logits of width `size`, read once."""
    sizes = _known.setdefault(tokenizer, {})
    if size not in sizes:
        sizes[size] = Vocabulary(tokenizer, size)
    return sizes[size]

"""The bytes of a tokenizer's tokens, and look-up of tokens by their bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.byte_cache import ByteCache
from anydecode.models.tokenizer import Tokenizer

#: Maximum size of the sets of tokens that are kept, which complete texts, in bytes; and the size of
#: such a set per token.
MAX_COMPLETED_BYTES, _BYTES_PER_TOKEN = 16 << 20, 96


class Vocabulary:
    """The bytes of the tokens of one tokenizer.

    `token_bytes[token]` is empty for special tokens and for ids from the tokenizer's vocabulary
    size up to `size`, the width of the logits.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        num_tokens = min(size, tokenizer.vocab_size)
        self.size = size
        self.token_bytes = [tokenizer.token_bytes(token) for token in range(num_tokens)] + [b""] * (
            size - num_tokens
        )
        self._order = sorted(range(num_tokens), key=self.token_bytes.__getitem__)
        self._sorted = [self.token_bytes[token] for token in self._order]
        self._longest = max(map(len, self._sorted), default=0)
        self._bytes = np.frombuffer(b"".join(self._sorted), np.uint8)
        #: By position in `_bytes`, the place in `_sorted` of the token there.
        self._owners = np.repeat(
            np.arange(num_tokens, dtype=np.int32), list(map(len, self._sorted))
        )
        #: `tokens_completing` of the last texts.
        self._completed: ByteCache[frozenset[bytes], frozenset[int]] = ByteCache(
            MAX_COMPLETED_BYTES
        )

    def tokens_with_prefix(self, prefix: bytes) -> Iterator[int]:
        """Tokens whose bytes start with `prefix` (not empty), in the order of their bytes."""
        index = bisect_left(self._sorted, prefix)
        while index < len(self._sorted) and self._sorted[index].startswith(prefix):
            yield self._order[index]
            index += 1

    @cached_property
    def bytes_within(self) -> frozenset[int]:
        """The bytes of which tokens are made, although none is a token of its own."""
        used = np.unique(self._bytes).tolist()
        single = {text[0] for text in self._sorted if len(text) == 1}
        return frozenset(used) - single

    def has_longer(self, prefix: bytes) -> bool:
        """Whether a token longer than `prefix` starts with it."""
        index = bisect_right(self._sorted, prefix)
        return index < len(self._sorted) and self._sorted[index].startswith(prefix)

    def tokens_equal_to(self, data: bytes) -> Iterator[int]:
        """Tokens whose bytes equal `data` (not empty)."""
        for token in self.tokens_with_prefix(data):
            if len(self.token_bytes[token]) > len(data):
                return
            yield token

    def tokens_completing(self, texts: Iterable[bytes]) -> frozenset[int]:
        """Tokens with which a text may come to contain one of `texts` (not empty): those that
        contain one, and those that begin with an end of one."""
        key = frozenset(texts)
        found = self._completed.get(key)
        if found is None:
            is_found = np.zeros(len(self._sorted), bool)
            for text in key:
                is_found[self._containing(text)] = True
                for start in range(max(1, len(text) - self._longest), len(text)):
                    is_found[self._beginning_with(text[start:])] = True
            found = frozenset(self._order[place] for place in np.flatnonzero(is_found).tolist())
            self._completed.put(key, found, _BYTES_PER_TOKEN * len(found) + sum(map(len, key)))
        return found

    def _containing(self, text: bytes) -> np.ndarray:
        """The places in `_sorted` of the tokens that contain `text`."""
        if len(text) > self._longest:
            return np.empty(0, np.int32)
        num_starts = len(self._bytes) - len(text) + 1
        starts = np.flatnonzero(self._bytes[:num_starts] == text[0])
        for offset in range(1, len(text)):
            if not len(starts):
                break
            starts = starts[self._bytes[starts + offset] == text[offset]]
        owners: np.ndarray = self._owners[starts]
        return owners[owners == self._owners[starts + len(text) - 1]]

    def _beginning_with(self, prefix: bytes) -> slice:
        """The places in `_sorted` of the tokens that begin with `prefix`."""
        start = bisect_left(self._sorted, prefix)
        if start == len(self._sorted) or not self._sorted[start].startswith(prefix):
            return slice(0)
        size = len(prefix)
        return slice(start, bisect_right(self._sorted, prefix, start, key=lambda data: data[:size]))

    def tokenize_greedily(self, text: bytes) -> list[int] | None:
        """Tokenizes `text`, taking the longest matching token each time. None if no token matches
        the remaining text."""
        tokens: list[int] = []
        while text:
            match = next(
                (
                    token
                    for length in range(len(text), 0, -1)
                    for token in self.tokens_equal_to(text[:length])
                ),
                None,
            )
            if match is None:
                return None
            tokens.append(match)
            text = text[len(self.token_bytes[match]) :]
        return tokens


_vocabularies: WeakKeyDictionary[Tokenizer, dict[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The vocabulary of `tokenizer` for logits of width `size`, cached."""
    sizes = _vocabularies.setdefault(tokenizer, {})
    if size not in sizes:
        sizes[size] = Vocabulary(tokenizer, size)
    return sizes[size]

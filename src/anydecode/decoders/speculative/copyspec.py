"""CopySpec: drafts copied from the context, found by a rolling hash (Dumitru et al., "CopySpec:
Accelerating LLMs with Speculative Copy-and-Paste", arXiv:2502.08923).

The last `ngram` tokens are looked up in the context by hash. The tokens that followed their first
occurrence are the draft.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

_BASE = 1_000_003
_MODULUS = (1 << 61) - 1


class RollingIndex:
    """The first position of each run of `ngram` tokens of a growing text. Runs are found by a
    rolling hash and then compared token by token, so hash collisions do no harm."""

    def __init__(self, gram: int, modulus: int = _MODULUS) -> None:
        self.gram = gram
        self.tokens: list[int] = []
        self._modulus = modulus
        self._leading_factor = pow(_BASE, gram, modulus)
        self._hash = 0
        self._starts: dict[int, int | list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append `tokens` to the text. A run is indexed once a token follows it."""
        gram, modulus = self.gram, self._modulus
        for token in tokens:
            start = len(self.tokens) - gram
            if start >= 0:
                self._add_run(self._hash, start)
            self.tokens.append(token)
            value = self._hash * _BASE + token + 1
            if start >= 0:
                value -= (self.tokens[start] + 1) * self._leading_factor
            self._hash = value % modulus

    def match(self) -> int | None:
        """The first earlier start of the text's last `ngram` tokens, or None."""
        last = self.tokens[-self.gram :]
        if len(last) < self.gram:
            return None
        stored = self._starts.get(self._hash)
        for start in [stored] if isinstance(stored, int) else stored or []:
            if self.tokens[start : start + self.gram] == last:
                return start
        return None

    def _add_run(self, key: int, start: int) -> None:
        stored = self._starts.get(key)
        if stored is None:
            self._starts[key] = start
            return
        run = self.tokens[start : start + self.gram]
        starts = [stored] if isinstance(stored, int) else stored
        if all(self.tokens[other : other + self.gram] != run for other in starts):
            self._starts[key] = [*starts, start]


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, gram: int) -> None:
        super().__init__(sequence)
        self.index = RollingIndex(gram)

    def read(self, tokens: list[int]) -> None:
        self.index.extend(tokens)

    def tree(self, size: int) -> TokenTree:
        start = self.index.match()
        if start is None:
            return TokenTree()
        end = start + self.index.gram
        return TokenTree.chain(self.text[end : end + size])


class CopySpecDrafter(Drafter):
    """Drafts the tokens that followed the first occurrence of the last `ngram` tokens."""

    def __init__(self, gram: int = 3) -> None:
        if gram < 1:
            raise InvalidRequestError("copyspec needs ngram >= 1")
        self.gram = gram

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.gram)


@register(
    Card(
        "copyspec",
        "speculative",
        paper="CopySpec (arXiv:2502.08923)",
        exactness="token-exact",
        summary="A rolling hash of the last tokens finds the earlier text to copy from.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "runs with equal hashes are compared token by token",
            "at most 10 tokens are copied by default (the released script: 100)",
            "without a match there is no draft; no draft model is used instead",
        ),
    )
)
def copyspec(size: int = 10, ngram: int = 3) -> Speculative:
    """CopySpec.

    Args:
        size: Maximum number of copied tokens per pass.
        ngram: Length of the token run that is looked up.
    """
    return Speculative(CopySpecDrafter(ngram), size)

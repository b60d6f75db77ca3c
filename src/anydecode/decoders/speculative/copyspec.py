"""Drafts copied from the context, found by the hash of the last few tokens (Dumitru et al.,
"CopySpec: Accelerating LLMs with Speculative Copy-and-Paste", arXiv:2502.08923)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Speculative, TextDraftSession
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

_BASE = 1_000_003
_MODULUS = (1 << 61) - 1


class RollingIndex:
    """Where each run of `gram` tokens of a growing text first stood. Runs are found by a rolling
    hash and compared token for token, so that equal hashes mislead nobody."""

    def __init__(self, gram: int, modulus: int = _MODULUS) -> None:
        self.gram = gram
        self.tokens: list[int] = []
        self._modulus = modulus
        self._leaving = pow(_BASE, gram, modulus)
        self._hash = 0
        self._starts: dict[int, int | list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Add what came behind the text. A run counts once something follows it."""
        gram, modulus = self.gram, self._modulus
        for token in tokens:
            start = len(self.tokens) - gram
            if start >= 0:
                self._enter(self._hash, start)
            self.tokens.append(token)
            value = self._hash * _BASE + token + 1
            if start >= 0:
                value -= (self.tokens[start] + 1) * self._leaving
            self._hash = value % modulus

    def match(self) -> int | None:
        """Where the text's last `gram` tokens first stood before, if they did."""
        last = self.tokens[-self.gram :]
        if len(last) < self.gram:
            return None
        held = self._starts.get(self._hash)
        for start in [held] if isinstance(held, int) else held or []:
            if self.tokens[start : start + self.gram] == last:
                return start
        return None

    def _enter(self, key: int, start: int) -> None:
        held = self._starts.get(key)
        if held is None:
            self._starts[key] = start
            return
        run = self.tokens[start : start + self.gram]
        known = [held] if isinstance(held, int) else held
        if all(self.tokens[other : other + self.gram] != run for other in known):
            self._starts[key] = [*known, start]


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
        behind = start + self.index.gram
        return TokenTree.chain(self.text[behind : behind + size])


class CopySpecDrafter(Drafter):
    """Copies what followed the first place of the last `gram` tokens."""

    def __init__(self, gram: int = 3) -> None:
        if gram < 1:
            raise InvalidRequestError("copyspec needs gram of at least 1")
        self.gram = gram

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.gram)


@register(
    Card(
        "copyspec",
        "speculative",
        paper="CopySpec (arXiv:2502.08923)",
        exactness="token-exact",
        summary="A rolling hash of the last tokens finds where to copy from.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "runs with equal hashes are compared token for token",
            "at most 10 tokens are copied (the released script: 100)",
            "where nothing matches there is no draft; no draft model steps in",
        ),
    )
)
def copyspec(size: int = 10, gram: int = 3) -> Speculative:
    """CopySpec with runs of `gram` tokens and up to `size` copied tokens."""
    return Speculative(CopySpecDrafter(gram), size)

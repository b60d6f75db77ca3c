"""Drafts copied from where the last few tokens stood before (A. Saxena, "Prompt Lookup Decoding",
2023, github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Speculative, TextDraftSession
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class NgramIndex:
    """Where each n-gram of a growing text last ended, for n = 1 to `longest`."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def extend(self, tokens: list[int]) -> None:
        """Add what came behind the text. An n-gram counts once something follows it."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                self._ends[n - 1][tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def continuation(self, count: int, shortest: int = 1) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the longest matching
        suffix of the text."""
        length = len(self.tokens)
        for n in range(min(self.longest, length), shortest - 1, -1):
            end = self._ends[n - 1].get(tuple(self.tokens[length - n :]))
            if end is not None:
                return self.tokens[end : end + count]
        return []


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, longest: int, shortest: int) -> None:
        super().__init__(sequence)
        self.shortest = shortest
        self.index = NgramIndex(longest)

    def read(self, tokens: list[int]) -> None:
        self.index.extend(tokens)

    def tree(self, size: int) -> TokenTree:
        return TokenTree.chain(self.index.continuation(size, self.shortest))


class PromptLookupDrafter(Drafter):
    """Copies what followed the last occurrence of the longest matching suffix, `longest` tokens at
    most and `shortest` at least."""

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidRequestError("prompt lookup needs 1 <= shortest <= longest")
        self.longest = longest
        self.shortest = shortest

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.longest, self.shortest)


@register(
    Card(
        "prompt-lookup",
        "speculative",
        paper="Prompt Lookup Decoding (Saxena, 2023)",
        exactness="token-exact",
        summary="Drafts are copied from where the last tokens stood before in prompt or answer.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=("the latest earlier occurrence is copied, not the first",),
    )
)
def prompt_lookup(size: int = 7, longest: int = 3, shortest: int = 1) -> Speculative:
    """Prompt lookup with up to `size` drafts per pass."""
    return Speculative(PromptLookupDrafter(longest, shortest), size)

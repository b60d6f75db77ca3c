"""Prompt lookup decoding: drafts copied from the text (A. Saxena, "Prompt Lookup Decoding", 2023,
github.com/apoorvumang/prompt-lookup-decoding).

The longest suffix of the text that occurred before is looked up in an n-gram index. The tokens that
followed it are the draft.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class _Session(TextDraftSession):
    copies_text = True
    learns_without_drafts = False

    def __init__(self, sequence: Sequence, index: NgramIndex) -> None:
        super().__init__(sequence)
        self.index = index

    def read(self, tokens: list[int]) -> None:
        self.index.extend(tokens)

    def tree(self, size: int) -> TokenTree:
        end, length = self.index.find(self.text)
        return TokenTree.chain(self.text[end : end + size] if length else [])


class PromptLookupDrafter(Drafter):
    """Drafts the tokens that followed the last occurrence of the longest matching suffix of
    `min_ngram` to `max_ngram` tokens."""

    requirements = Requirements(takes_prediction=True)

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidRequestError("prompt lookup needs 1 <= min_ngram <= max_ngram")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, NgramIndex(range(self.min_ngram, self.max_ngram + 1)))


@register(
    Card(
        "prompt-lookup",
        "speculative",
        paper="Prompt Lookup Decoding (Saxena, 2023)",
        exactness="token-exact",
        summary=(
            "Drafts are copied from the last occurrence of the text's last tokens"
            " in prompt or answer."
        ),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the latest earlier occurrence is copied, not the first, also where fewer than `size`"
            " tokens follow it",
            "7 drafts by default (the original: 10)",
        ),
        remote={
            "size": Range(1, 64),
            "max_ngram": Range(1, 32),
            "min_ngram": Range(1, 32),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def prompt_lookup(
    size: int = 7,
    max_ngram: int = 3,
    min_ngram: int = 1,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Prompt lookup decoding.

    Args:
        size: Maximum number of drafts per pass.
        max_ngram: Longest suffix that is looked up, in tokens.
        min_ngram: Shortest suffix that is looked up, in tokens.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    return Speculative(PromptLookupDrafter(max_ngram, min_ngram), size, acceptance_rule(acceptance))

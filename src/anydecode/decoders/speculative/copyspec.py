"""CopySpec: drafts copied from the context (Dumitru et al., "CopySpec: Accelerating LLMs with
Speculative Copy-and-Paste", arXiv:2502.08923).

The last `ngram` tokens are looked up in an index of the context. The tokens that followed their
first occurrence are the draft.
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

    def __init__(self, sequence: Sequence, gram: int) -> None:
        super().__init__(sequence)
        self.index = NgramIndex([gram], keep_first=True)

    def read(self, tokens: list[int]) -> None:
        self.index.extend(tokens)

    def tree(self, size: int) -> TokenTree:
        end, length = self.index.find(self.text)
        return TokenTree.chain(self.text[end : end + size] if length else [])


class CopySpecDrafter(Drafter):
    """Drafts the tokens that followed the first occurrence of the last `ngram` tokens."""

    requirements = Requirements(takes_prediction=True)

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
        summary="An index of n-grams finds the earlier text to copy from.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "n-grams are looked up by their tokens, not by a rolling hash",
            "at most 10 tokens are copied by default (the released script: 100)",
            "without a match there is no draft; no draft model is used instead",
        ),
        remote={
            "size": Range(1, 64),
            "ngram": Range(1, 32),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def copyspec(
    size: int = 10,
    ngram: int = 3,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """CopySpec.

    Args:
        size: Maximum number of copied tokens per pass.
        ngram: Length of the token run that is looked up.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    return Speculative(CopySpecDrafter(ngram), size, acceptance_rule(acceptance))

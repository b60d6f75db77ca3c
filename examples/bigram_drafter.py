"""A drafter outside the package: it drafts the chain of tokens that followed last time.

anydecode generate --decoder bigram --prompt "one two one two one"
anydecode certify bigram_drafter:bigram
"""

from __future__ import annotations

from anydecode import (
    Card,
    Drafter,
    DraftSession,
    InvalidRequestError,
    Sequence,
    Speculative,
    TextDraftSession,
    TokenTree,
    register,
)


class BigramSession(TextDraftSession):
    """What one text has taught so far: the last token that followed each token."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence)
        self.follower: dict[int, int] = {}

    def read(self, tokens: list[int]) -> None:
        """Learn from `tokens`, which have just been appended to `self.text`."""
        new = self.text[-len(tokens) - 1 :]
        self.follower.update(zip(new, new[1:], strict=False))

    def tree(self, size: int) -> TokenTree:
        """A chain of up to `size` drafts behind the text."""
        drafts: list[int] = []
        token = self.text[-1]
        while len(drafts) < size and token in self.follower:
            token = self.follower[token]
            drafts.append(token)
        return TokenTree.chain(drafts)


class BigramDrafter(Drafter):
    """Drafts, for each token, the token that followed it last time."""

    def open(self, sequence: Sequence) -> DraftSession:
        return BigramSession(sequence)


@register(
    Card(
        "bigram",
        "speculative",
        paper="an example",
        exactness="token-exact",
        summary="Drafts the chain of tokens that followed each other last time.",
    )
)
def bigram(size: int = 4) -> Speculative:
    """Speculative decoding with `BigramDrafter`.

    Args:
        size: Maximum number of drafts per pass.
    """
    if size < 1:
        raise InvalidRequestError(f"size must be at least 1, not {size}")
    return Speculative(BigramDrafter(), size)

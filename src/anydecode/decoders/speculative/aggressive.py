"""Input-guided aggressive decoding: drafts copied from the input in order (Ge et al., "Lossless
Acceleration for Seq2seq Generation with Aggressive Decoding", arXiv:2205.10350; Sun et al.,
arXiv:2106.04970).

The draft is the part of the input that follows the current position. After a mismatch, copying
restarts where a suffix of the output occurs exactly once in the input.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
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


class InputPointer:
    """The position in `source` from which the output is being copied; `position` is None while it
    is not copied."""

    def __init__(self, source: list[int], position: int | None = None) -> None:
        self.source = source
        self.position = position
        self._output: list[int] = []
        self._positions: dict[int, list[int]] = {}
        for index, token in enumerate(source):
            self._positions.setdefault(token, []).append(index)

    def advance(self, token: int) -> None:
        """Append `token` to the output. Copying continues if the token is the next one of the
        source. Otherwise it restarts after the shortest suffix of the output that occurs in the
        source exactly once."""
        self._output.append(token)
        if self.position is not None:
            matches = self.position < len(self.source) and self.source[self.position] == token
            self.position = self.position + 1 if matches else None
            if matches:
                return
        self.position = self._find_unique_suffix()

    def _find_unique_suffix(self) -> int | None:
        ends = self._positions.get(self._output[-1], [])
        length = 1
        while len(ends) > 1 and length < len(self._output):
            token = self._output[-1 - length]
            ends = [end for end in ends if end >= length and self.source[end - length] == token]
            length += 1
        return ends[0] + 1 if len(ends) == 1 else None


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, start: int | None) -> None:
        super().__init__(sequence)
        if sequence.prediction is None:
            self.pointer = InputPointer(list(sequence.prompt), start)
        else:
            self.pointer = InputPointer(sequence.prediction.tokens, 0)

    def read(self, tokens: list[int]) -> None:
        first = len(self.text) - len(tokens)
        for token in tokens[max(0, len(self.sequence.prompt) - first) :]:
            self.pointer.advance(token)

    def tree(self, size: int) -> TokenTree:
        position = self.pointer.position
        return (
            TokenTree()
            if position is None
            else TokenTree.chain(self.pointer.source[position : position + size])
        )


class AggressiveDrafter(Drafter):
    """Drafts the prompt's tokens that follow the copied position, which is `start` at first. With a
    prediction of the answer, that is the input instead, copied from its beginning."""

    requirements = Requirements(takes_prediction=True)

    def __init__(self, start: int | None = None) -> None:
        if start is not None and start < 0:
            raise InvalidRequestError("aggressive needs start >= 0")
        self.start = start

    def prepare(self, sequence: Sequence) -> None:
        if self.start is not None and self.start >= len(sequence.prompt):
            raise InvalidRequestError(
                f"start={self.start} must be below the prompt's {len(sequence.prompt)} tokens"
            )

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.start)


@register(
    Card(
        "aggressive",
        "speculative",
        paper="Input-guided Aggressive Decoding (arXiv:2205.10350)",
        exactness="token-exact",
        summary=(
            "The draft is copied from the input; after an edit, copying restarts"
            " at a unique suffix."
        ),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the source is the whole prompt of a decoder-only model; copying begins at `start` if"
            " given, else once a suffix of the answer occurs in it exactly once",
            "at most `size` tokens are drafted at a time, not the whole rest of the input",
        ),
        remote={
            "size": Range(1, 64),
            "start": Range(0, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def aggressive(
    size: int = 16,
    start: int | None = None,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Input-guided aggressive decoding.

    Args:
        size: Maximum number of drafts per pass.
        start: Prompt position where the source begins; by default it is found by matching.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    return Speculative(AggressiveDrafter(start), size, acceptance_rule(acceptance))

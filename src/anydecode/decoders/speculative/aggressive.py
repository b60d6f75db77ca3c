"""Drafts copied from the input in order (Ge et al., "Lossless Acceleration for Seq2seq Generation
with Aggressive Decoding", arXiv:2205.10350; Sun et al., arXiv:2106.04970)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Speculative, TextDraftSession
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class InputPointer:
    """Where in `source` the output is being copied from; `position` is None while it is not."""

    def __init__(self, source: list[int], position: int | None = None) -> None:
        self.source = source
        self.position = position
        self._output: list[int] = []
        self._positions: dict[int, list[int]] = {}
        for index, token in enumerate(source):
            self._positions.setdefault(token, []).append(index)

    def advance(self, token: int) -> None:
        """The output goes on with `token`. Copying goes on while it is what the source says, and
        begins again behind the shortest suffix of the output that stands in the source once."""
        self._output.append(token)
        if self.position is not None:
            follows = self.position < len(self.source) and self.source[self.position] == token
            self.position = self.position + 1 if follows else None
            if follows:
                return
        self.position = self._unique()

    def _unique(self) -> int | None:
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
        self.pointer = InputPointer(list(sequence.prompt), start)

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
    """Copies the prompt from the place where the answer has got to; from `start` at first."""

    def __init__(self, start: int | None = None) -> None:
        if start is not None and start < 0:
            raise InvalidRequestError("aggressive needs a start of at least 0")
        self.start = start

    def prepare(self, sequence: Sequence) -> None:
        if self.start is not None and self.start >= len(sequence.prompt):
            raise InvalidRequestError(
                f"start={self.start} is behind the prompt, which has {len(sequence.prompt)} tokens"
            )

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.start)


@register(
    Card(
        "aggressive",
        "speculative",
        paper="Input-guided Aggressive Decoding (arXiv:2205.10350)",
        exactness="token-exact",
        summary="The input is the draft; after an edit, copying restarts at a unique suffix.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the source is the whole prompt of a decoder-only model; copying begins at `start` if"
            " given, else once a suffix of the answer stands in it exactly once",
            "at most `size` tokens are drafted at a time, not all the rest of the input",
        ),
    )
)
def aggressive(size: int = 16, start: int | None = None) -> Speculative:
    """Input-guided aggressive decoding; `start` is the prompt position where the source begins."""
    return Speculative(AggressiveDrafter(start), size)

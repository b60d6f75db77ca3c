"""Drafts from an n-gram pool that a window of Jacobi iterations fills (Fu et al., "Break the
Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv:2402.02057)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


class LookaheadDrafter(Drafter):
    """`window` columns, n-grams of `ngram` tokens, at most `guesses` of them verified at a time."""

    needs_every_row = True

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        if window < 1 or ngram < 2 or guesses < 1:
            raise InvalidRequestError("lookahead needs window >= 1, ngram >= 2 and guesses >= 1")
        self.window = window
        self.ngram = ngram
        self.guesses = guesses

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(TextDraftSession):
    """`levels[r][c]` guesses the token r + c + 1 places behind the text; a level's tokens came from
    the pass that the level above was the input of. In the tree, the first level is a chain and
    every further level hangs on the one above it, column by column."""

    def __init__(self, sequence: Sequence, drafter: LookaheadDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.levels: list[list[int]] = []
        self._drafted: TokenTree | None = None
        self._positions: list[list[int]] = []

    def tree(self, size: int) -> TokenTree:
        drafter = self.drafter
        if not self.levels:
            self.levels = [self._filler(drafter.window)]
        room = size - len(self.levels) * drafter.window
        known = self.pool.get(self.text[-1], {})
        count = min(drafter.guesses, max(0, room) // (drafter.ngram - 1))
        self._drafted = tree = TokenTree.merge(list(known)[::-1][:count])
        self._positions = []
        for level in self.levels:
            above = self._positions[-1] if self._positions else None
            positions: list[int] = []
            for column, token in enumerate(level):
                if above is not None:
                    parent = above[column]
                else:
                    parent = positions[-1] if positions else ROOT
                positions.append(tree.add(token, parent))
            self._positions.append(positions)
        return tree

    def observe(self, round: SpeculationRound) -> None:
        """The last level's rows give each column's next token: an n-gram for the pool, and the
        window's new last level."""
        if round.tree is not self._drafted:
            return
        logits = round.scores.logits
        fresh = [int(logits[position + 1].argmax()) for position in self._positions[-1]]
        whole = len(self.levels) == self.drafter.ngram - 1
        if whole:
            for column, token in enumerate(fresh):
                self._remember([*(level[column] for level in self.levels), token])
            del self.levels[0]
        self.levels.append(fresh)
        # One token further is what the shift by a level stands for; the rest shifts columns.
        surplus = len(round.verdict.tokens) - 1
        filler = self._filler(self.drafter.window)
        width = self.drafter.window
        self.levels = [(level[surplus:] + filler)[:width] for level in self.levels]

    def _remember(self, ngram: list[int]) -> None:
        known = self.pool.setdefault(ngram[0], {})
        known.pop(tuple(ngram[1:]), None)
        known[tuple(ngram[1:])] = None
        if len(known) > self.drafter.guesses:
            del known[next(iter(known))]

    def _filler(self, count: int) -> list[int]:
        """Tokens of the text, spread over it: something to begin with."""
        length = len(self.text)
        return [self.text[(position * 7919 + length) % length] for position in range(count)]


@register(
    Card(
        "lookahead",
        "speculative",
        paper="Lookahead Decoding (arXiv:2402.02057)",
        exactness="token-exact",
        summary="Jacobi iterations beside the text fill a pool of n-grams to draft from.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "after several accepted tokens the window moves by as many columns",
            "the window's own nodes may be accepted too",
            "5 columns, 4-grams and 5 guesses by default (the paper, for 7B on a GPU: 15, 5, 15)",
            "new columns begin with tokens spread over the text, not with random ones",
        ),
    )
)
def lookahead(window: int = 5, ngram: int = 4, guesses: int = 5) -> Speculative:
    """Lookahead decoding; a pass has up to (window + guesses) (ngram - 1) draft rows."""
    drafter = LookaheadDrafter(window, ngram, guesses)
    return Speculative(drafter, (window + guesses) * (ngram - 1))

"""Lookahead decoding: drafts from an n-gram pool (Fu et al., "Break the Sequential Dependency of
LLM Inference Using Lookahead Decoding", arXiv:2402.02057).

Each pass also runs one Jacobi iteration over a window of future tokens. The n-grams that the
iterations produce are stored. Those that start with the last token are drafted.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.bounded_table import BoundedTable
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Maximum memory of the n-grams of one request, in bytes, and that of a token's, of an n-gram, and
#: of a token in it.
POOL_MEMORY = 8 << 20
_BYTES_PER_KEY, _BYTES_PER_NGRAM, _BYTES_PER_TOKEN = 300, 150, 8


class LookaheadDrafter(Drafter):
    """Drafts n-grams of `ngram` tokens from a window of `window` columns, at most `max_ngrams`
    n-grams per pass."""

    needs_every_row = True

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        if window < 1 or ngram < 2 or guesses < 1:
            raise InvalidRequestError("lookahead needs window >= 1, ngram >= 2 and max_ngrams >= 1")
        self.window = window
        self.ngram = ngram
        self.guesses = guesses

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(TextDraftSession):
    """The window and the n-gram pool of one sequence.

    `levels[r][c]` predicts the token r + c + 1 positions after the text. The tokens of a level were
    predicted by the pass whose input was the level above. In the tree, the first level is a chain;
    every further level hangs on the one above, column by column.
    """

    def __init__(self, sequence: Sequence, drafter: LookaheadDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        bytes_per_ngram = _BYTES_PER_NGRAM + _BYTES_PER_TOKEN * drafter.ngram
        self.pool: BoundedTable[int, dict[tuple[int, ...], None]] = BoundedTable(
            POOL_MEMORY, _BYTES_PER_KEY + drafter.guesses * bytes_per_ngram
        )
        self.levels: list[list[int]] = []
        self._drafted: TokenTree | None = None
        self._positions: list[list[int]] = []

    def tree(self, size: int) -> TokenTree:
        drafter = self.drafter
        if not self.levels:
            self.levels = [self._filler(drafter.window)]
        num_free_rows = size - len(self.levels) * drafter.window
        ngrams = self.pool.get(self.text[-1], {})
        count = min(drafter.guesses, max(0, num_free_rows) // (drafter.ngram - 1))
        self._drafted = tree = TokenTree.merge(list(ngrams)[::-1][:count])
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
        """Take the next level from the scores of a round that has drafted the window, and move the
        window with the text."""
        if not self.levels:
            return
        shift = len(round.result.tokens)
        if round.tree is self._drafted and self._advance(round.scores.logits):
            shift -= 1  # replacing a level has moved the window by one token
        width = self.drafter.window
        filler = self._filler(width)
        self.levels = [(level[shift:] + filler)[:width] for level in self.levels]

    def _advance(self, logits: np.ndarray) -> bool:
        """Append the tokens that the rows of the last level predict, in `logits` `[rows,
        vocab_size]` of the whole tree. Of a full window the columns are stored as n-grams, and the
        first level is dropped. Returns whether the window was full."""
        next_tokens = [int(logits[position + 1].argmax()) for position in self._positions[-1]]
        is_full = len(self.levels) == self.drafter.ngram - 1
        if is_full:
            for column, token in enumerate(next_tokens):
                self._store([*(level[column] for level in self.levels), token])
            del self.levels[0]
        self.levels.append(next_tokens)
        return is_full

    def _store(self, ngram: list[int]) -> None:
        self.pool[ngram[0]] = ngrams = self.pool.get(ngram[0], {})
        ngrams.pop(tuple(ngram[1:]), None)
        ngrams[tuple(ngram[1:])] = None
        if len(ngrams) > self.drafter.guesses:
            del ngrams[next(iter(ngrams))]

    def _filler(self, count: int) -> list[int]:
        """Tokens sampled evenly from the text, as initial values."""
        return [self.text[position * 7919 % len(self.text)] for position in range(count)]


@register(
    Card(
        "lookahead",
        "speculative",
        paper="Lookahead Decoding (arXiv:2402.02057)",
        exactness="token-exact",
        summary="Jacobi iterations in each pass fill a pool of n-grams to draft from.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the window moves by as many columns as tokens are accepted, and its first column"
            " stands behind the last token (the code: at it)",
            "the window's own nodes may be accepted too",
            "5 columns, 4-grams and 5 guesses by default (the paper, for 7B on a GPU: 15, 5, 15)",
            "new columns start with tokens spread over the text, not with random ones",
            "of a request's n-grams, those of the first token that was written longest ago are"
            " dropped above 8 MiB",
        ),
        remote={
            "window": Range(1, 16),
            "ngram": Range(2, 8),
            "max_ngrams": Range(1, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def lookahead(
    window: int = 5,
    ngram: int = 4,
    max_ngrams: int = 5,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Lookahead decoding. A pass has up to (window + guesses) * (ngram - 1) draft rows.

    Args:
        window: Columns of the Jacobi window.
        ngram: Tokens per n-gram.
        max_ngrams: Maximum number of n-grams verified per pass.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    drafter = LookaheadDrafter(window, ngram, max_ngrams)
    size = (window + max_ngrams) * (ngram - 1)
    return Speculative(drafter, size, acceptance_rule(acceptance))

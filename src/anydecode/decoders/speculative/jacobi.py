"""Jacobi decoding: fixed-point iteration over a block of tokens (Santilli et al., "Accelerating
Transformer Inference for Translation via Parallel Decoding", arXiv:2305.10427).

All tokens of a block are predicted in parallel from the previous predictions. This repeats until
the block no longer changes, which gives the tokens of plain decoding.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import LOGIT_RULES, logit_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import carried, draft_share
from anydecode.errors import InvalidRequestError
from anydecode.scoring.draft_policy import DraftShare
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Maximum number of predictions of a block whose distributions are kept for a rejection rule, which
#: bounds their memory. It tests the others as tokens that were chosen, which is exact too.
MAX_DISTRIBUTIONS = 64


@dataclass(eq=False)
class _Block:
    """The block up to the length `end` of the text: the iterate behind the text, and the
    distributions that its first tokens were sampled from, if the rule compares with them."""

    end: int
    iterate: list[int] = field(default_factory=list)
    rows: list[np.ndarray] | None = None


_STATE: StateKey[_Block] = StateKey("jacobi", "state")


@register(
    Card(
        "jacobi",
        "speculative",
        paper="Parallel Decoding (arXiv:2305.10427): PJ, PGJ and HGJ",
        exactness="token-exact",
        summary=(
            "All tokens of a block are predicted in parallel, repeatedly, until"
            " they no longer change."
        ),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "tokens that can no longer change are emitted at once and not computed again",
            "works at any temperature: a token's noise is the same in every iteration",
            "a block starts as copies of the last token, or of `pad`; the paper's starts as PAD",
            "if the sampler has state, predictions that are not final are the most probable tokens",
            "with acceptance='rejection' a prediction is tested against the distribution that it"
            " was drawn from, the rule of Speculative Jacobi Decoding (arXiv:2410.01699)",
        ),
        bounds={"block": Range(0, 4096)},
        remote={"block": Range(1, 64), "length": Range(1, 4096), "acceptance": LOGIT_RULES},
    )
)
class Jacobi(Decoder):
    """Jacobi iteration over blocks of tokens.

    Args:
        block: Tokens per block (Gauss-Seidel over blocks); 0: all remaining tokens.
        pad: Initial token of a block; by default the last token of the text.
        length: Number of tokens after which decoding becomes plain (hybrid); None: never.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        block: int = 5,
        pad: int | None = None,
        length: int | None = None,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        if block < 0 or (length is not None and length < 0):
            raise InvalidRequestError("jacobi needs block >= 0 and length >= 0")
        self.block = block
        self.pad = pad
        self.length = length
        self.acceptance = logit_rule(acceptance, "jacobi")

    def prepare(self, sequence: Sequence) -> None:
        size = sequence.model().spec.vocab_size
        if self.pad is not None and not 0 <= self.pad < size:
            raise InvalidRequestError(
                f"pad={self.pad} is not a token: the model has {size} tokens, from 0"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        with closing(draft_share(sequence, self, self.acceptance)) as share:
            yield from self._iterate(sequence, share)

    def _iterate(self, sequence: Sequence, share: DraftShare) -> Decoding:
        block = carried(sequence, _STATE, self.acceptance, lambda: _Block(sequence.length))
        while not sequence.finished:
            if sequence.length >= block.end:
                block.end = sequence.length + self._block_size(sequence)
                pad = sequence.all_tokens[-1] if self.pad is None else self.pad
                block.iterate = [pad] * (block.end - sequence.length - 1)
                block.rows = distribution_list(self.acceptance)
            size = share.size(min(len(block.iterate), block.end - sequence.length - 1))
            tree = sampled_chain(block.iterate[:size], block.rows)
            scores = yield sequence.verify(tree, optional=share.chances(tree))
            tree = tree.first(len(scores) - 1)
            result = self.acceptance.walk(tree, scores)
            share.observe(tree, result.path, 0.0)
            # Predictions behind the scored ones stay as they are.
            rest = block.iterate[len(scores) :]
            block.iterate = _next(sequence, scores, len(result.path)) + rest
            if block.rows is not None:
                block.rows = _distributions(sequence, scores, len(result.path))
            sequence.record(tree, result.path, result.tokens)
            sequence.accept(result.path, result.tokens, scores)
        sequence.state.discard(_STATE)

    def _block_size(self, sequence: Sequence) -> int:
        left = sequence.remaining
        if self.length is not None:
            left = min(left, max(1, self.length - len(sequence.tokens)))
            if len(sequence.tokens) >= self.length:
                return 1
        return min(self.block or left, left)


def _next(sequence: Sequence, scores: Scores, num_accepted: int) -> list[int]:
    """The next iterate after the accepted tokens. A stateful sampler may not be able to process
    predictions that it forbids, so with one the rows are read without it."""
    rows = range(num_accepted + 1, len(scores))
    if sequence.sampler.is_stateful:
        return [int(scores.logits[row].argmax()) for row in rows]
    return [scores.sample(row) for row in rows]


def _distributions(sequence: Sequence, scores: Scores, num_accepted: int) -> list[np.ndarray]:
    """The distributions that the first tokens of `_next` were sampled from, float64 `[vocab_size]`;
    none if they were not sampled."""
    if sequence.sampler.is_stateful:
        return []
    size, first = scores.logits.shape[1], num_accepted + 1
    rows = range(first, min(len(scores), first + MAX_DISTRIBUTIONS))
    return [scores.distribution(row).dense(size) for row in rows]

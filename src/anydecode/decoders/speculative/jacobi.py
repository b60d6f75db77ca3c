"""Fixed-point iteration over a block of tokens (Santilli et al., "Accelerating Transformer
Inference for Translation via Parallel Decoding", arXiv:2305.10427)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


@register(
    Card(
        "jacobi",
        "speculative",
        paper="Parallel Decoding (arXiv:2305.10427): PJ, PGJ and HGJ",
        exactness="token-exact",
        summary="All tokens of a block are guessed at once, and again until nothing changes.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "tokens that can no longer change are said at once and not run again",
            "works at any temperature: a token's noise is the same in every iteration",
            "a block begins as copies of the last token said, or of `pad`; the paper's are PAD",
            "where the policy has a state, guesses that are not yet fixed are the likeliest tokens",
        ),
    )
)
class Jacobi(Decoder):
    """`block` tokens are iterated together, block after block (Gauss-Seidel); 0: all that may still
    be said. A block starts as copies of `pad` (default: the last token said). After `length` tokens
    (hybrid) decoding goes on plainly."""

    def __init__(self, block: int = 5, pad: int | None = None, length: int | None = None) -> None:
        if block < 0 or (length is not None and length < 0):
            raise InvalidRequestError("jacobi needs block and length of at least 0")
        self.block = block
        self.pad = pad
        self.length = length
        self.acceptance = TokenExact()

    def prepare(self, sequence: Sequence) -> None:
        size = sequence.context().pool.model.spec.vocab_size
        if self.pad is not None and not 0 <= self.pad < size:
            raise InvalidRequestError(f"pad={self.pad} is no token of the model: it has {size}")

    def decode(self, sequence: Sequence) -> Decoding:
        guess: list[int] = []
        end = sequence.length
        while not sequence.finished:
            if sequence.length >= end:
                end = sequence.length + self._block(sequence)
                pad = sequence.all_tokens[-1] if self.pad is None else self.pad
                guess = [pad] * (end - sequence.length - 1)
            tree = TokenTree.chain(guess[: end - sequence.length - 1])
            scores = yield sequence.verify(tree)
            verdict = self.acceptance.walk(tree, scores)
            guess = _next(sequence, scores, len(verdict.path))
            sequence.record(tree, verdict.path, verdict.tokens)
            sequence.accept(verdict.path, verdict.tokens, scores)

    def _block(self, sequence: Sequence) -> int:
        left = sequence.remaining
        if self.length is not None:
            left = min(left, max(1, self.length - len(sequence.tokens)))
            if len(sequence.tokens) >= self.length:
                return 1
        return min(self.block or left, left)


def _next(sequence: Sequence, scores: Scores, kept: int) -> list[int]:
    """The next iterate behind what is now fixed. A policy with a state may not know what to make of
    guesses that it forbids, so those rows are read without it."""
    rows = range(kept + 1, len(scores))
    if sequence.sampler.stateful:
        return [int(scores.logits[row].argmax()) for row in rows]
    return [scores.sample(row) for row in rows]

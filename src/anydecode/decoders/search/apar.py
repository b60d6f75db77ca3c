"""APAR (Liu et al., "APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", arXiv:2401.06761).

The model marks where a detail belongs by a fork token, and goes on with the next point. The details
are written at the same time, each by a branch that sees the text up to its fork.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.branches import share_prefixes
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.noise import Noise
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey


@dataclass(eq=False)
class Row:
    """A text that grows.

    Attributes:
        noise: Its random numbers.
        tokens: What it reads behind the prompt: the text of the rows above up to its fork, and its
            own tokens, marks included.
        start: The number of tokens before its own.
        depth: The number of forks above it.
        is_over: Whether it has ended.
        details: The rows of its forks, in order.
    """

    noise: Noise
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    depth: int = 0
    is_over: bool = False
    details: list[Row] = field(default_factory=list)


_STATE: StateKey[list[Row]] = StateKey("apar", "rows")


@register(
    Card(
        "apar",
        "search",
        paper="APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding (arXiv:2401.06761)",
        exactness="lossy",
        summary="Writes the details of a list at the same time, where the model marks them by a"
        " fork token.",
        works_with=("batches", "adapters"),
        deviations=(
            "the marks are two tokens that the model has, by default two control characters; the"
            " paper adds tokens to the vocabulary",
            "a model that was not trained for it does not write the marks",
            "the text is emitted when all details are written; its marks are left out",
            "the limit of tokens counts those of all rows together, without marks",
            "`anydecode train trees` trains a low-rank adapter on the model's own answers, not all"
            " weights and the embeddings of the marks on answers that were collected",
        ),
        remote={"rows": Range(1, 32), "depth": Range(0, 8)},
    )
)
class Apar(Decoder):
    """Where the model writes the fork token, a copy of the text goes on with the child token and
    writes the detail, and the text itself goes on with the next point. The copies share their
    caches. A detail ends with an end token, and stands in the answer where its fork is.

    The child token is never sampled, and the fork token not directly behind one of both, nor by a
    row below `depth` forks, nor when there are `rows` rows. With one row the text is that of plain
    decoding without the marks.

    Args:
        rows: How many rows may grow at the same time.
        depth: How many forks may lie above each other.
        fork: The text of the fork token.
        child: The text of the child token.
    """

    def __init__(
        self, rows: int = 32, depth: int = 2, fork: str = "\x0e", child: str = "\x0f"
    ) -> None:
        if rows < 1 or depth < 0 or not fork or not child or fork == child:
            raise InvalidRequestError(
                "apar needs rows of at least 1, depth of at least 0 and two marks, not"
                f" {rows}, {depth}, {fork!r} and {child!r}"
            )
        self.rows = rows
        self.depth = depth
        self.marks = (fork, child)

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if constraint_of(sampler) is not None or sampler.pre_temperature:
            raise UnsupportedCombinationError(
                "apar writes parts of the text before others: it works with no constraint and no"
                " penalties"
            )
        if sequence.companion_prompts or sequence.compute_logprobs is not None:
            raise UnsupportedCombinationError(
                "apar orders its tokens at the end: it works with no second prompt, and gives no"
                " log-probabilities"
            )
        mark_tokens(sequence.tokenizers[TARGET], self.marks)

    def decode(self, sequence: Sequence) -> Decoding:
        fork, child = mark_tokens(sequence.tokenizers[TARGET], self.marks)
        rows = sequence.state.setdefault(_STATE, [Row(sequence.noise)])
        ends = sequence.tokenizers[TARGET].eos_ids
        sequence.kv_cache()
        base = sequence.fork()
        base.tokens = []
        if len(rows) > 1 and len(unscored := base.unscored()) > 1:  # after a restart; all share it
            yield base.score(unscored[:-1])
        branches: list[Sequence] = []
        while True:
            has_new = len(branches) < len(rows)
            while len(branches) < len(rows):
                row = rows[len(branches)]
                origin = next((n for n, one in enumerate(rows) if row in one.details), None)
                branches.append((base if origin is None else branches[origin]).branch())
            for branch, row in zip(branches, rows, strict=True):
                branch.tokens = list(row.tokens)
            written = assembled(rows[0], (fork, child), ends)
            live = [number for number, row in enumerate(rows) if not row.is_over]
            if not live or len(written) >= sequence.remaining:
                break
            if has_new:
                yield from share_prefixes([branches[number] for number in live])
            results = yield [branches[number].score() for number in live]
            for number, scores in zip(live, results, strict=True):
                self._take(sequence, rows, number, scores.row(-1), (fork, child))
                rows[number].is_over = rows[number].tokens[-1] in ends
        for branch in (base, *branches):
            branch.release()
        sequence.emit([*written, rows[0].tokens[-1]] if rows[0].is_over else written)

    def _take(
        self,
        sequence: Sequence,
        rows: list[Row],
        number: int,
        logits: np.ndarray,
        marks: tuple[int, int],
    ) -> None:
        """Sample the next token of a row, and open the row of its detail if it is a fork."""
        row, (fork, child) = rows[number], marks
        masked = logits.copy()
        masked[child] = -np.inf
        num_live = sum(not one.is_over for one in rows)
        if num_live >= self.rows or row.depth >= self.depth or row.tokens[-1:] in ([fork], [child]):
            masked[fork] = -np.inf
        position = len(sequence.prompt) + len(row.tokens)
        token = sequence.sampler.sample(masked, row.noise, position)
        row.tokens.append(token)
        if token == fork:
            detail = Row(
                sequence.noise.forked(len(rows)),
                [*row.tokens, child],
                len(row.tokens) + 1,
                row.depth + 1,
            )
            row.details.append(detail)
            rows.append(detail)


def mark_tokens(tokenizer: Tokenizer, marks: tuple[str, str]) -> tuple[int, int]:
    """The fork and the child token.

    Raises:
        UnsupportedCombinationError: A mark is not one token.
    """
    found = [tokenizer.encode(mark, special=False) for mark in marks]
    if [len(ids) for ids in found] != [1, 1]:
        raise UnsupportedCombinationError(
            f"apar needs a tokenizer with a token for each of {marks[0]!r} and {marks[1]!r}"
        )
    return found[0][0], found[1][0]


def assembled(row: Row, marks: tuple[int, int], ends: frozenset[int]) -> list[int]:
    """The tokens of a row, each fork replaced by those of its detail, without marks and ends."""
    details = iter(row.details)
    text: list[int] = []
    for token in row.tokens[row.start :]:
        if token == marks[0]:
            text += assembled(next(details), marks, ends)
        elif token not in ends:
            text.append(token)
    return text

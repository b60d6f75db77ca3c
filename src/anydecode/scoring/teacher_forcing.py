"""Scoring of given text: the rows of a model that reads tokens which it has not sampled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence

#: Rows per request, which bounds the memory for the logits of a long text.
CHUNK = 64


def score_tokens(
    sequence: Sequence,
    tokens: list[int],
    first: int,
    on_row: Callable[[np.ndarray, int], None],
    runner: str = TARGET,
) -> Decoding:
    """Teacher forcing: run `tokens` and report the logits of each of `tokens[first:]`.

    These rows are computed even if the prefix cache has them; only positions before `first - 1` may
    come from it. Afterwards the sequence cache contains all of `tokens` but the last.

    Args:
        sequence: The sequence whose cache is used.
        tokens: Token ids of the whole text.
        first: Index of the first token to report, 1 or more.
        on_row: Called as `on_row(logits, token)` with float32 `[vocab_size]` logits of the position
            before the token.
        runner: The model.
    """
    kv_cache = sequence.kv_cache(runner)
    kv_cache.truncate(min(kv_cache.length, first - 1))
    if kv_cache.length < first - 1:
        begin = tokens[kv_cache.length : first - 1]
        yield sequence.score(begin, runner=runner, companions=False)
    for start in range(first - 1, len(tokens) - 1, CHUNK):
        stop = min(start + CHUNK, len(tokens) - 1)
        part = tokens[start:stop]
        scores = yield sequence.score(part, runner=runner, rows="all", companions=False)
        for row, token in zip(scores.logits, tokens[start + 1 : stop + 1], strict=True):
            on_row(row, token)

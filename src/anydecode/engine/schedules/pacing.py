"""Default number of prompt rows that run together with decodes: as many as increase the time
between tokens by a given factor, by the measured pass costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest

#: Maximum number of prompt rows per pass.
MAX_PROMPT_ROWS = 512


def checked_stretch(stretch: float) -> float:
    """Returns `stretch`. Raises `InvalidRequestError` if it leaves no time for prompts."""
    if not stretch > 1:
        raise InvalidRequestError(f"stretch must be more than 1, not {stretch:g}")
    return stretch


def rows_beside(
    decodes: Seq[ScoreRequest], prompts: Seq[ScoreRequest], stretch: float, *, whole: bool = False
) -> int:
    """The maximum number of rows of `prompts` such that a pass takes at most `stretch` times as
    long as the `decodes` alone.

    Args:
        decodes: The requests that run in every pass.
        prompts: The waiting prompts, not empty.
        stretch: Allowed factor on the duration of a pass.
        whole: Choose the rows for all passes until the prompts are done: with the context length
            at their end, and assuming at least one decoding sequence.

    Returns:
        Between 1 and `MAX_PROMPT_ROWS`; the latter if there are no decodes.
    """
    rows, decode_length = sum(request.num_rows for request in decodes), mean_length(decodes)
    if not (rows or whole):
        return MAX_PROMPT_ROWS
    prompt_length = mean_length(prompts[:1]) + (prompts[0].num_rows if whole else 0)
    if not rows:
        rows, decode_length = 1, prompt_length
    seconds = stretch * prompts[0].sequence.cost_model.seconds(rows, decode_length)
    return max(1, _rows_within(seconds, rows, decode_length, prompt_length, prompts[0]))


def rows_within(seconds: float, decodes: Seq[ScoreRequest], prompts: Seq[ScoreRequest]) -> int:
    """The maximum number of rows of `prompts`, 0 to `MAX_PROMPT_ROWS`, such that a pass with the
    `decodes` takes at most so many seconds by its predicted cost."""
    rows, decode_length = sum(request.num_rows for request in decodes), mean_length(decodes)
    return _rows_within(seconds, rows, decode_length, mean_length(prompts[:1]), prompts[0])


def _rows_within(
    seconds: float, rows: int, decode_length: int, prompt_length: int, prompt: ScoreRequest
) -> int:
    """As `rows_within`, beside `rows` rows that attend to `decode_length` positions each."""
    cost_model = prompt.sequence.cost_model
    low, high = 0, MAX_PROMPT_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        length = (rows * decode_length + middle * prompt_length) // (rows + middle)
        if cost_model.seconds(rows + middle, length) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def is_prompt(request: ScoreRequest) -> bool:
    """Whether a request runs the prompt of a sequence without generated tokens and may be divided
    into chunks. Prompts of any length count: 60 rows also delay a single decode."""
    return (
        request.num_rows > 1
        and not request.sequence.root.tokens
        and all(span.divisible for spans in request.groups for span in spans)
    )


def mean_length(requests: Seq[ScoreRequest]) -> int:
    """The mean number of cached positions of `requests`."""
    kv_caches = [spans[-1].kv_cache for request in requests for spans in request.groups]
    return sum(kv_cache.length for kv_cache in kv_caches) // max(1, len(kv_caches))

"""The number of log-probabilities that running requests may record, which bounds their memory."""

from __future__ import annotations

from collections.abc import Callable

from anydecode.api.request import Request
from anydecode.server.errors import ApiError


def max_logprobs(requests: list[Request]) -> int:
    """The largest number of log-probabilities that `requests` record: of the tokens of every
    sample up to its limit, and of those of the prompts, each with its alternatives."""
    count = 0
    for request in requests:
        params = request.params
        if params.logprobs is not None:
            count += len(request.jobs) * request.limit * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            count += len(request.prompt) * (1 + params.prompt_logprobs)
    return count


class LogprobBudget:
    """Counts the log-probabilities of the requests to one model, at their largest possible number.

    Args:
        limit: Maximum number of log-probabilities.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_held = 0

    def check(self, count: int) -> None:
        """Raise `ApiError` unless a request with `count` log-probabilities can run now."""
        if count > self._limit:
            message = (
                f"the answer may have {count} log-probabilities (tokens of all samples, each with"
                f" its alternatives); allowed are {self._limit} (--max-logprobs): lower"
                " max_tokens, n, or the number of alternatives"
            )
            raise ApiError(400, message, code="too_many_logprobs", param="logprobs")
        if count and count + self._num_held > self._limit:
            message = (
                f"running requests may have {self._num_held} log-probabilities and this one"
                f" {count}; allowed are {self._limit} (--max-logprobs): try again later"
            )
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": "5"})

    def hold(self, count: int) -> Callable[[], None]:
        """Count `count` log-probabilities until the returned function is called, once."""
        self._num_held += count

        def release() -> None:
            self._num_held -= count

        return release

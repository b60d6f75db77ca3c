"""The buffer in front of the stop rules, and the state of retries."""

from __future__ import annotations

import pytest

from anydecode.api.text import OutputProcessor
from anydecode.decoders.constrained.validate_and_retry import OutputBuffer, RetryState
from anydecode.models.scripted import EOS, ByteTokenizer


class NoFives:
    """A validator that rejects the value 5, from its first token on."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token: int) -> int | None:
        self.num_tokens += 1
        return self.num_tokens - 1 if token == 5 else None

    def end(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("tokens", "taken", "reason", "num_valid"),
    [
        ([1, 2], 2, None, None),
        ([1, 2, 3], 3, "length", None),
        ([1, 2, 3, 4], 3, "length", None),
        ([1, EOS, 3], 2, "stop", None),
        ([1, 5, 3], 2, "invalid", 3),
    ],
)
def test_a_buffer_ends_at_the_limit_the_end_or_an_invalid_value(
    tokens: list[int], taken: int, reason: str | None, num_valid: int | None
) -> None:
    """Five tokens are left, and two have been accepted before."""
    outer = OutputProcessor(ByteTokenizer(), eos_ids=[EOS], max_tokens=5)
    buffer = OutputBuffer(outer, NoFives(), [8, 9])
    assert buffer.remaining == 3
    assert buffer.push(tokens) == (taken, reason)
    assert buffer.tokens == [8, 9, *tokens[:taken]] and buffer.remaining == 3 - taken
    assert (buffer.reason, buffer.num_valid) == (reason, num_valid)
    assert outer.num_tokens == 0


def test_bans_after_the_tokens_that_are_kept_are_dropped() -> None:
    state = RetryState([1, 2, 3], ["a", "b", "c"], {1: [7], 2: [8], 3: [9]})
    state.rewind(2)
    assert (state.tokens, state.logprobs) == ([1, 2], ["a", "b"])
    assert state.bans == {1: [7], 2: [8]}

"""A token that is banned at one position only."""

from __future__ import annotations

import numpy as np

from anydecode import Regex
from anydecode.constraints.constraint import TokenBan
from anydecode.models.scripted import ByteTokenizer

A, B, C = b"abc"


def allowed(ban: TokenBan) -> set[int]:
    mask = ban.mask()
    assert mask is not None
    return set(np.flatnonzero(mask).tolist())


def test_the_ban_holds_at_its_position_and_comes_back_with_it() -> None:
    state = Regex("[abc]{4}").start(ByteTokenizer(), ByteTokenizer.vocab_size)
    ban = TokenBan(state, [A, C])
    assert allowed(ban) == {B}
    for _ in range(3):
        ban.advance(B)
        assert allowed(ban) == {A, B, C}
    fork = ban.fork()
    ban.rollback(2)
    assert allowed(ban) == {A, B, C}
    ban.rollback(1)
    assert allowed(ban) == {B}
    assert allowed(fork) == {A, B, C}


def test_nothing_is_forced_at_the_position_of_the_ban() -> None:
    state = Regex("ab").start(ByteTokenizer(), ByteTokenizer.vocab_size)
    ban = TokenBan(state, [C])
    assert ban.forced_tokens() == []
    ban.advance(A)
    assert ban.forced_tokens()[:1] == [B]

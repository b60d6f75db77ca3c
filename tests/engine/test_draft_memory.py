"""A text may fill the whole key-value cache: at its end, where drafts do not fit beside it, exact
methods go on without them."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.methods import build_decoder
from anydecode.errors import OutOfMemoryError
from anydecode.scoring.sequence import Sequence
from random_scenarios import accepted
from random_worlds import world

POSITIONS = 48


def text(name: str, decoder: str, num_left: int) -> list[int]:
    """The text behind a prompt that leaves so many positions."""
    prompt = [97 + i * i % 3 for i in range(POSITIONS - num_left)]
    options: dict[str, Any] = {"temperature": 0.5, "seed": 2, "ignore_eos": True}
    with world(name).open(cache_positions=POSITIONS, prefix_cache=False) as llm:
        found = llm.generate(prompt, decoder=decoder, max_tokens=64, **options).tokens
        llm.engine.check_integrity()
        return found


def exact(name: str) -> set[str]:
    """The token-exact decoders that a world allows."""
    return {one for one in accepted(name) if build_decoder(one).exactness == "token-exact"}


def check(name: str, decoders: set[str]) -> None:
    expected = {left: text(name, "autoregressive", left) for left in (1, 9)}
    assert [len(one) for one in expected.values()] == [1, 9] and decoders
    for decoder in decoders:
        for left, tokens in expected.items():
            assert text(name, decoder, left) == tokens, (decoder, left)


def test_a_text_that_fills_the_cache_is_that_of_plain_decoding() -> None:
    check("tiny repeats", exact("tiny repeats"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["eagle3", "early_exit", "longspec", "medusa", "hydra", "chimera", "dflash", "pard", "falcon"]
    + ["accelerated", "future", "transfer", "judged", "diffusion drafts"],
)
def test_other_drafters_leave_room_for_the_text(name: str) -> None:
    check(name, exact(name) - exact("tiny repeats"))


def test_drafts_that_are_never_left_out_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "can_draft", lambda self: True)
    with pytest.raises(OutOfMemoryError):
        text("tiny repeats", "lookahead", 4)

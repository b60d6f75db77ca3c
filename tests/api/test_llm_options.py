"""A wrong value of an option of `LLM` is an error in one line when the model is opened."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM
from anydecode.errors import AnydecodeError

NO_INTEGERS: tuple[Any, ...] = (1.5, float("nan"), "", "x", "4", b"x", [1], {}, object())
WRONG: list[tuple[str, str, Any]] = [
    *(("tiny-blocks", "block", value) for value in (0, -1, -(10**400), *NO_INTEGERS)),
    *(("tiny-diffusion", "mask", value) for value in (-1, 10**9, 10**400, *NO_INTEGERS)),
    *(
        ("tiny-diffusion", "family", value)
        for value in ("", "x", "\x00", "\ud800", 1, [], {}, b"x")
    ),
    *(("tiny-autoregressive", "max_running", value) for value in (0, -1, *NO_INTEGERS)),
    *(
        ("tiny-autoregressive", "cache_positions", value)
        for value in (-1, 2**63, 10**400, 1.5, "x")
    ),
    *(("tiny-autoregressive", "cache_memory", value) for value in (1.5, [], {}, b"x", "many")),
    *(
        ("tiny-autoregressive", "prefix_spill", value)
        for value in (1, [], "\x00", "~nobody-here/x")
    ),
    *(("tiny-autoregressive", "device", value) for value in (1, [1], b"x", "\x00")),
    *(("tiny-autoregressive", "draft", value) for value in ("\x00", "\ud800", "~nobody-here/x")),
    ("tiny-autoregressive", "draft", "a" * 5000),
    ("a" * 5000, "threads", 1),
    ("~nobody-here/x", "threads", 1),
]


@pytest.mark.parametrize(
    "model, name, value", [pytest.param(*one, id=f"{one[1]}-{n}") for n, one in enumerate(WRONG)]
)
def test_a_wrong_option_is_an_error_in_one_line(model: str, name: str, value: Any) -> None:
    with pytest.raises(AnydecodeError) as caught:
        LLM(model, **{name: value}).close()
    assert "\n" not in str(caught.value)

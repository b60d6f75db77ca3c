"""A wrong value of an option of `LLM` is an error in one line when the model is opened."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM
from anydecode.errors import AnydecodeError

NO_INTEGERS: tuple[Any, ...] = (1.5, float("nan"), "", "x", "4", b"x", [1], {}, object())
NO_SIZES: tuple[Any, ...] = (
    True, -1, 2**63, 10**400, 10**5000, str(2**63), "8388608TiB", "9" * 5000,
    1.5, float("nan"), [], {}, b"x", "many",
)  # fmt: skip
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
    *(("tiny-autoregressive", "row_budget", value) for value in (0, -1, True, *NO_INTEGERS)),
    *(
        ("tiny-autoregressive", name, value)
        for name in ("cache_memory", "spill_limit")
        for value in NO_SIZES
    ),
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
    options: dict[str, Any] = {"prefix_spill": "memory"} if name == "spill_limit" else {}
    with pytest.raises(AnydecodeError) as caught:
        LLM(model, **options, **{name: value}).close()
    assert "\n" not in str(caught.value)


def test_the_smallest_and_largest_values_are_accepted() -> None:
    LLM("tiny-autoregressive", row_budget=1, cache_memory=2**63 - 1).close()
    LLM("tiny-autoregressive", prefix_spill="memory", spill_limit=1).close()

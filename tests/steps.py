"""Counts what a call does, so that a test can bound it on every machine alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class TooManySteps(BaseException):
    """A call takes more steps than it may. No `except Exception` hides it."""


def num_steps(call: Callable[[], Any], max_steps: int | None = None) -> int:
    """The number of lines of Python that `call` runs in this thread, each turn of a loop anew.

    Args:
        call: What is counted.
        max_steps: Where it is stopped.

    Raises:
        TooManySteps: It takes more than `max_steps`.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if max_steps is not None and count > max_steps:
                raise TooManySteps(f"more than {max_steps} steps, in {frame.f_code.co_name}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

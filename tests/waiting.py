"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `condition` returns as soon as that is true."""
    stop = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < stop, "the condition did not become true"
        time.sleep(0.02)
    return found

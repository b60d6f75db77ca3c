"""Limits of a model's config values, so that sizes and their sums fit the kernels' 32-bit
integers."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from anydecode.errors import CheckpointError

#: Maximum of widths, windows and context lengths, and of heads times head size.
MAX_SIZE = 1 << 30
#: Maximum of the number of heads and of the dimensions of one head.
MAX_COUNT = 1 << 16
#: Maximum of the positions of a convolution.
MAX_WINDOW = 64
#: Maximum of the number of tokens of a vocabulary.
MAX_TOKENS = 1 << 24
#: Maximum of the number of layers, and of the experts of all layers together. Lists are built with
#: an entry for each, so these bound the memory that a small file can ask for.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 17
#: Maximum of the streams of hidden states.
MAX_STREAMS = 64
#: Range of factors: wider than any model needs, narrower than float32.
MIN_FACTOR, MAX_FACTOR = 1e-9, 1e9


class ConfigError(CheckpointError):
    """A value of a model's config is missing, wrong or not supported."""


def integer(name: str, value: Any, low: int = 1, high: int = MAX_SIZE) -> int:
    """`value`, checked to be an integer from `low` to `high`.

    Raises:
        ConfigError: It is not; the message names the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refusal(name, value, f"an integer from {low} to {high}")
    return value


def number(name: str, value: Any, low: float = MIN_FACTOR, high: float = MAX_FACTOR) -> float:
    """`value`, checked to be a finite number from `low` to `high`.

    Raises:
        ConfigError: It is not; the message names the value and the range.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or not math.isfinite(value):
        raise refusal(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def refusal(name: str, value: Any, allowed: str) -> ConfigError:
    """The error for a value that is not allowed."""
    return ConfigError(f"{name} is {reprlib.repr(value)}; allowed is {allowed}")

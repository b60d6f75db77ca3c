"""How a tool stores the parts of a quantised module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Weight

#: Reads a tensor of the checkpoint by name; whether there is one; the module's name; the settings
#: of the quantisation. Returns the module's weight, or its tensor where it is not quantised.
Read = Callable[[Callable[[str], np.ndarray], Callable[[str], bool], str, Any], Weight | np.ndarray]


@dataclass(frozen=True)
class Layout:
    """The tensors of one kind of packed module.

    Attributes:
        marker: The tensor that only these modules have.
        parts: The tensors of one module, except its bias.
        read: Reads a module's weight.
    """

    marker: str
    parts: tuple[str, ...]
    read: Read

"""Whether the Triton kernels can run here. Imports nothing heavy, so that anyone may ask."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

#: How every kernel is compiled: a multiplication and an addition are two roundings, fused into what
#: stands around them or not.
COMPILED: dict[str, Any] = {"enable_fp_fusion": False}


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not() -> str | None:
    """What stands in the way of the Triton kernels; None where they can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def kernel_device() -> str:
    """Where the kernels' tensors lie: "cpu" in the interpreter, else "cuda"."""
    return "cpu" if interpreted() else "cuda"


def part_of_kernel(function: Any) -> Any:
    """Decorates what kernels call: compiled with them, or plain Python in the interpreter, which
    takes milliseconds to enter a function of its own."""
    if interpreted():
        return function
    import triton

    return triton.jit(function)

"""Whether the Triton kernels can run on this machine. Importing this module is fast."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

#: Options of every kernel. Without fusion, a multiplication and an addition always round twice, so
#: that bits do not depend on the surrounding code.
COMPILED: dict[str, Any] = {"enable_fp_fusion": False}


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def unavailable_reason() -> str | None:
    """Why the Triton kernels cannot run; None where they can."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    if is_interpreted():
        return None
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def kernel_device() -> str:
    """The device of the kernels' tensors: "cpu" in the interpreter, else "cuda"."""
    return "cpu" if is_interpreted() else "cuda"


def part_of_kernel(function: Any) -> Any:
    """Decorator of functions that kernels call.

    They are compiled with the kernel. In the interpreter they stay plain Python, because a call of
    a jitted function takes milliseconds there.
    """
    if is_interpreted():
        return function
    import triton

    return triton.jit(function)

"""Reads NVFP4 weights: 4-bit numbers, a scale in E4M3 for every 16 of them, and one float32 factor.

ModelOpt stores `weight` (two numbers per byte), `weight_scale` and the factor `weight_scale_2`;
compressed-tensors stores `weight_packed`, `weight_scale` and the divisor `weight_global_scale`. The
scales of activations are not used: products round activations to int8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import BLOCKS, halves_paired
from anydecode.kernels.interface import Weight

_GROUP = 16  # numbers per scale
_E4M3_NAN = 127


@dataclass(frozen=True)
class Layout:
    """Where a tool stores the parts of a weight; see `gptq.py` for the meaning of the members."""

    tool: str
    setting: str  # of the config, which must be `value`
    value: str
    codes: str
    factor: str
    is_divisor: bool  # whether weights are divided by the factor
    input_factor: str

    @property
    def MARKER(self) -> str:
        """The tensor that only packed modules have."""
        return self.factor

    @property
    def PARTS(self) -> tuple[str, ...]:
        """The tensors of one packed module, except its bias."""
        return self.codes, "weight_scale", self.factor, self.input_factor

    def check(self, settings: Mapping[str, Any], path: object) -> None:
        """Raise `CheckpointError` for unsupported settings."""
        found = settings.get(self.setting)
        if found != self.value:
            raise CheckpointError(
                f"{path}: {self.tool} with {self.setting} {found!r} is not supported; supported is"
                f" {self.value!r}"
            )

    def read(
        self,
        get: Callable[[str], np.ndarray],
        has: Callable[[str], bool],
        module: str,
        settings: Any,
    ) -> Weight:
        """Read a module's weight. `get` reads a tensor of the checkpoint by name."""
        factor = _number(get, f"{module}.{self.factor}")
        codes, scales = get(f"{module}.{self.codes}"), get(f"{module}.weight_scale")
        return _weight(module, codes, scales, 1 / factor if self.is_divisor else factor)


MODELOPT = Layout(
    "ModelOpt", "quant_algo", "NVFP4", "weight", "weight_scale_2", False, "input_scale"
)
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "format", "nvfp4-pack-quantized", "weight_packed", "weight_global_scale",
    True, "input_global_scale",
)  # fmt: skip


def _number(get: Callable[[str], np.ndarray], name: str) -> float:
    tensor = get(name)
    number = float(tensor.reshape(-1)[0]) if tensor.size == 1 else 0.0
    if tensor.dtype != np.float32 or not 0 < number < np.inf:
        raise CheckpointError(
            f"{name!r} is {tensor.dtype} of shape {tensor.shape}, not one positive float32"
        )
    return number


def _weight(module: str, codes: np.ndarray, scales: np.ndarray, scale: float) -> Weight:
    """A weight in GGUF's blocks of 64 numbers.

    Args:
        module: The name of the module.
        codes: uint8 `[out, in / 2]`; the first of two numbers is in the low half of a byte.
        scales: float8_e4m3fn `[out, in / 16]`.
        scale: The factor of all.
    """
    values, size = BLOCKS["NVFP4"]
    is_valid = codes.ndim == 2 and codes.dtype == np.uint8 and scales.dtype.name == "float8_e4m3fn"
    if not is_valid or scales.shape != (len(codes), codes.shape[1] * 2 // _GROUP):
        raise CheckpointError(
            f"the quantised parts of {module!r} do not fit together: {codes.dtype} codes of shape"
            f" {codes.shape} and {scales.dtype} scales of shape {scales.shape}"
        )
    rows, num_inputs = codes.shape[0], codes.shape[1] * 2
    if not codes.size or num_inputs % values:
        raise CheckpointError(
            f"{module!r} has {num_inputs} inputs; NVFP4 needs a multiple of {values}"
        )
    stored = scales.view(np.uint8)
    if (stored >= _E4M3_NAN).any():
        raise CheckpointError(f"a scale of {module!r} is negative or no number")
    blocks = np.empty((rows, num_inputs // values, size), np.uint8)
    blocks[..., :4] = stored.reshape(rows, -1, 4)
    packed = halves_paired(codes.reshape(rows, -1, 4, 8))
    blocks[..., 4:] = packed.reshape(rows, -1, values // 2)
    return Weight("NVFP4", rows, num_inputs, blocks.reshape(rows, -1), module, scale)

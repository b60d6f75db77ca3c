"""Functions of one number, and sums, whose bits never depend on where a number stands.

Vectorised math libraries treat the tail of an array with other code than its body, and their sums
choose an order by shape. Here everything is made of additions, multiplications, divisions and
square roots, which IEEE 754 rounds the same way everywhere, in an order that is written down.
"""

from __future__ import annotations

import math

import torch

_LOG2_E = 1.0 / math.log(2.0)
# log(2) in two parts: the first has few enough bits that a product with a small integer is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_EXP_TERMS = [1.0 / math.factorial(k) for k in range(8, 0, -1)]
_LEAST_EXP, _MOST_EXP = -87.0, 88.0


def _expm1_small(r: torch.Tensor) -> torch.Tensor:
    """exp(r) - 1 for |r| <= 0.35, by its series."""
    value = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        value = value * r + term
    return value * r


def exp(x: torch.Tensor) -> torch.Tensor:
    """e**x in float32, within 2 units in the last place; 0 below -87, and x is capped at 88."""
    capped = x.clamp(_LEAST_EXP, _MOST_EXP)
    power = torch.round(capped * _LOG2_E)
    r = (capped - power * _LN2_HIGH) - power * _LN2_LOW
    two_to_power = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    value = (_expm1_small(r) + 1.0) * two_to_power
    return torch.where(x < _LEAST_EXP, torch.zeros_like(value), value)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh(x) in float32, within 4 units in the last place."""
    double = x + x
    small = _expm1_small(double.clamp(-0.35, 0.35))
    large = exp(double.abs().clamp(max=30.0))
    outer = (large - 1.0) / (large + 1.0)
    outer = torch.where(x < 0, -outer, outer)
    return torch.where(double.abs() <= 0.35, small / (small + 2.0), outer)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))"""
    return x / (exp(-x) + 1.0)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))), the approximation most models mean."""
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return (tanh(inner) + 1.0) * x * 0.5


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def tree_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sum over one dimension, halves added to halves until one is left."""
    size = x.shape[dim]
    while size > 1:
        half = size // 2
        summed = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if size % 2:
            summed = torch.cat((summed, x.narrow(dim, size - 1, 1)), dim)
        x, size = summed, half + size % 2
    return x.select(dim, 0)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis in float32."""
    weights = exp(x - x.amax(-1, keepdim=True))
    return weights / tree_sum(weights).unsqueeze(-1)


class RotaryTable:
    """Cosines and sines `[positions, half]` of one set of frequencies, grown as positions come.

    Angles are float32 products, as the models were trained with; their cosines are taken one by
    one in double precision, so that an entry does not depend on when it was made.
    """

    def __init__(self, frequencies: torch.Tensor, factor: float, device: torch.device) -> None:
        self._frequencies = frequencies.to("cpu", torch.float32)
        self._factor = factor
        self._cos = torch.empty(0, len(frequencies), device=device)
        self._sin = torch.empty(0, len(frequencies), device=device)

    def rows(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine rows of `positions` (int64), none above `highest`."""
        known = len(self._cos)
        if highest >= known:
            self._grow(max(highest + 1, known + 64, known * 5 // 4))
        return self._cos[positions], self._sin[positions]

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions so far. Growing makes new tensors."""
        return self._cos, self._sin

    def _grow(self, length: int) -> None:
        places = torch.arange(len(self._cos), length, dtype=torch.float32)
        angles = (places[:, None] * self._frequencies[None, :]).flatten().tolist()
        shape = (len(places), len(self._frequencies))
        for name, function in (("_cos", math.cos), ("_sin", math.sin)):
            fresh = torch.tensor([function(a) for a in angles], dtype=torch.float32).view(shape)
            old = getattr(self, name)
            setattr(self, name, torch.cat((old, (fresh * self._factor).to(old.device))))

"""Elementwise functions and sums whose bits do not depend on a number's position in an array.

Vectorised math libraries process the tail of an array with other code than its body, and choose the
order of a sum by the shape. The functions here use only additions, multiplications, divisions and
square roots, which IEEE 754 rounds in the same way everywhere, in a fixed order.
"""

from __future__ import annotations

import math

import torch

from anydecode.kernels.interface import Rope
from anydecode.kernels.torch_arrays import as_tensor

_LOG2_E = 1.0 / math.log(2.0)
# log(2) in two parts. The first has few bits, so that its product with a small integer is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_EXP_TERMS = [1.0 / math.factorial(k) for k in range(8, 0, -1)]
_MIN_EXP, _MAX_EXP = -87.0, 88.0


def _expm1_small(r: torch.Tensor) -> torch.Tensor:
    """exp(r) - 1 for |r| <= 0.35, by its series."""
    value = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        value = value * r + term
    return value * r


def exp(x: torch.Tensor) -> torch.Tensor:
    """e**x in float32, within 2 units in the last place; 0 below -87, and x is capped at 88."""
    capped = x.clamp(_MIN_EXP, _MAX_EXP)
    power = torch.round(capped * _LOG2_E)
    r = (capped - power * _LN2_HIGH) - power * _LN2_LOW
    two_to_power = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    value = (_expm1_small(r) + 1.0) * two_to_power
    return torch.where(x < _MIN_EXP, torch.zeros_like(value), value)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh(x) in float32, within 4 units in the last place."""
    double = x + x
    small = _expm1_small(double.clamp(-0.35, 0.35))
    large = exp(double.abs().clamp(max=30.0))
    outer = (large - 1.0) / (large + 1.0)
    outer = torch.where(x < 0, -outer, outer)
    return torch.where(double.abs() <= 0.35, small / (small + 2.0), outer)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))"""
    return 1.0 / (exp(-x) + 1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), with log(1 + u) = 2 artanh(u / (2 + u)) by its series."""
    u = exp(-x.abs())
    z = u / (u + 2.0)
    square = z * z
    value = torch.full_like(z, 1.0 / 17)
    for k in range(15, 0, -2):
        value = value * square + 1.0 / k
    return x.clamp(min=0.0) + value * z * 2.0


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))"""
    return x / (exp(-x) + 1.0)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))), the approximation most models use."""
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return (tanh(inner) + 1.0) * x * 0.5


_ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + erf(x / sqrt(2))), within 2e-7 |x|: erf from Abramowitz and Stegun 7.1.26."""
    z = x.abs() * math.sqrt(0.5)
    t = 1.0 / (z * 0.3275911 + 1.0)
    tail = torch.full_like(t, _ERF_TERMS[0])
    for term in _ERF_TERMS[1:]:
        tail = tail * t + term
    tail = tail * t * exp(-z * z) * 0.5
    return x * torch.where(x < 0, tail, 1.0 - tail)


def clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """See `ClampedSwiglu`."""
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1.0) * (gate * sigmoid(gate * alpha))


def capped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """See `CappedSwiglu`."""
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def limited_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """See `LimitedSwiglu`."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, cap: float, up_cap: float | None
) -> torch.Tensor:
    """See `SituGlu`."""
    if up_cap is not None:
        up = tanh(up / up_cap) * up_cap
    return tanh(gate / cap) * cap * sigmoid(gate) * up


def identity(x: torch.Tensor) -> torch.Tensor:
    """x"""
    return x


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2"""
    positive = x.clamp(min=0.0)
    return positive * positive


def signed_root(x: torch.Tensor) -> torch.Tensor:
    """sqrt(max(|x|, 1e-6)) with the sign of x, and 0 at 0."""
    return torch.sqrt(x.abs().clamp(min=1e-6)) * torch.sign(x)


def xielu(
    x: torch.Tensor, positive: float, negative: float, beta: float, eps: float
) -> torch.Tensor:
    """See `Xielu`."""
    below = (exp(x.clamp(max=eps)) - 1.0 - x) * negative
    return torch.where(x > 0, x * x * positive, below) + x * beta


ACTIVATIONS = {
    "relu": torch.relu,
    "relu2": relu2,
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "exp": exp,
    "identity": identity,
    "signed_root": signed_root,
}


def tree_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sum over one dimension: the second half is added to the first until one entry is left."""
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


def rope_factor(rope: Rope, position: int) -> float:
    """The factor of the cosines and sines at `position`."""
    if not rope.growth:
        return rope.factor
    steps = (position + rope.growth_start) // rope.growth_period
    return rope.factor * (1.0 + rope.growth * math.log(1.0 + steps))


class RotaryTable:
    """Cosines and sines `[positions, half]` of a set of frequencies, extended on demand.

    Angles are float32 products, as in training. Cosines and sines are computed one by one in double
    precision, so that an entry does not depend on when it was computed.
    """

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._rope = rope
        self._frequencies = as_tensor(rope.frequencies).to("cpu", torch.float32)
        self._cos = torch.empty(0, len(rope.frequencies), device=device)
        self._sin = torch.empty(0, len(rope.frequencies), device=device)

    def rows(self, positions: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine rows of `positions` (int64), of which none exceeds `max_position`."""
        length = len(self._cos)
        if max_position >= length:
            self._grow(max(max_position + 1, length + 64, length * 5 // 4))
        return self._cos[positions], self._sin[positions]

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions so far. Growth replaces both tensors."""
        return self._cos, self._sin

    def _grow(self, length: int) -> None:
        first = len(self._cos)
        positions = torch.arange(first, length, dtype=torch.float32)
        angles = (positions[:, None] * self._frequencies[None, :]).flatten().tolist()
        shape = (len(positions), len(self._frequencies))
        factors = torch.tensor([rope_factor(self._rope, p) for p in range(first, length)])
        for name, function in (("_cos", math.cos), ("_sin", math.sin)):
            added = torch.tensor([function(a) for a in angles], dtype=torch.float32).view(shape)
            old = getattr(self, name)
            setattr(self, name, torch.cat((old, (added * factors[:, None]).to(old.device))))

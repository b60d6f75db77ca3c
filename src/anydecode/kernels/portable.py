"""Functions of float64 numbers with the same bits on every machine, by additions, multiplications
and divisions only. Those of numpy and of C libraries differ in the last bits, by processor and
version.

Each takes an array or one number, and returns the same. `cpu/doubles.h` computes logarithms,
exponentials, sines and cosines in the same way.
"""

from __future__ import annotations

import math

import numpy as np

# log(2) as a sum. The first part has few bits, so that its product with a small integer is exact.
_LOG2_HIGH, _LOG2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_SQRT2 = 1.4142135623730951
_LOG_TERMS = [1.0 / k for k in range(23, 1, -2)]
_EXP_TERMS = [1.0 / math.factorial(k) for k in range(13, 1, -1)]
# pi / 2 as a sum, in the same way.
_HALF_PI = tuple(
    float.fromhex(part) for part in ("0x1.921fb54p+0", "0x1.10b46118p-30", "0x1.313198a2e037p-61")
)
_SINE_TERMS = [(-1) ** (k // 2) / math.factorial(k) for k in range(17, 1, -2)]
_COSINE_TERMS = [(-1) ** (k // 2) / math.factorial(k) for k in range(18, 0, -2)]


def _series(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    """The polynomial of these coefficients, that of the highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def log(x: np.ndarray | float) -> np.ndarray:
    """The natural logarithm of positive normal numbers, within 3 units in the last place."""
    half, exponent = np.frexp(np.asarray(x, np.float64))  # x = half * 2**exponent, 0.5 <= half < 1
    is_low = 2.0 * half <= _SQRT2
    m, n = np.where(is_low, 2.0 * half, half), (exponent - is_low).astype(np.float64)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    result: np.ndarray = n * _LOG2_HIGH + (
        n * _LOG2_LOW + 2.0 * (s + s * z * _series(z, _LOG_TERMS))
    )
    return result


def exp(x: np.ndarray | float) -> np.ndarray:
    """e**x, within 2 units in the last place; 0 below -708, infinity above 709."""
    given = np.asarray(x, np.float64)
    inside = given.clip(-708.0, 709.0)
    n = np.rint(inside * 1.4426950408889634)
    r = (inside - n * _LOG2_HIGH) - n * _LOG2_LOW
    value = np.ldexp((r + _series(r, _EXP_TERMS) * (r * r)) + 1.0, n.astype(np.int32))
    return np.where(given < -708.0, 0.0, np.where(given > 709.0, np.inf, value))


def power(base: float, exponents: np.ndarray | float) -> np.ndarray:
    """A positive number to the power of others: within 1e-14 of it between 1e-20 and 1e20."""
    return exp(np.asarray(exponents, np.float64) * log(base))


def softplus(x: np.ndarray | float) -> np.ndarray:
    """log(1 + e**x), within 1e-15 of it."""
    given = np.asarray(x, np.float64)
    u = exp(-np.abs(given))
    above = 1.0 + u  # rounded: the logarithm is corrected by what that has lost
    gained = above - 1.0
    corrected = log(above) * (u / np.where(gained > 0, gained, 1.0))
    result: np.ndarray = np.maximum(given, 0.0) + np.where(gained > 0, corrected, u)
    return result


def sine_and_cosine(x: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Sines and cosines of angles up to 1e7 in radians, each within 1e-15 of it."""
    given = np.asarray(x, np.float64)
    n = np.rint(given * 0.6366197723675814)
    r = ((given - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    z = r * r
    sines = r + r * (z * _series(z, _SINE_TERMS))
    cosines = 1.0 + z * _series(z, _COSINE_TERMS)
    quarter = n.astype(np.int64) & 3
    is_odd, is_low, is_left = quarter % 2 == 1, quarter >= 2, (quarter == 1) | (quarter == 2)
    first, second = np.where(is_odd, cosines, sines), np.where(is_odd, sines, cosines)
    return np.where(is_low, -first, first), np.where(is_left, -second, second)

"""Numbers as short codes of symbols: the formats of "Decoding-based Regression" (Song and Bahri,
arXiv:2501.19383)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence as Seq
from fractions import Fraction

from anydecode.errors import InvalidRequestError

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SIGNS = "+-"
#: Maximum number of digits of a Hamming code, whose order is a table.
_MAX_HAMMING_DIGITS = 12
_MAX_LENGTH = 64

#: One index into the alphabet of each position.
Digits = tuple[int, ...]


class NumericCode(ABC):
    """A code of fixed length.

    Attributes:
        alphabets: The symbols that each position may have, one character each.
    """

    alphabets: list[str]

    @abstractmethod
    def encode(self, value: Fraction) -> Digits:
        """The code of the largest number that is not beyond `value`; nearer to zero if the code has
        a sign. Numbers outside of the range have the code of its nearer end.

        Raises:
            InvalidRequestError: The number is too large for the code.
        """

    @abstractmethod
    def decode(self, digits: Seq[int]) -> Fraction:
        """The number of a code."""

    def text(self, value: Fraction) -> str:
        """The symbols of the code of `value`."""
        digits = self.encode(value)
        return "".join(row[one] for row, one in zip(self.alphabets, digits, strict=True))


class NormalizedCode(NumericCode):
    """Numbers from 0 to 1: the first digits behind the point.

    Args:
        base: The base, 2 to 36.
        digits: How many digits.
    """

    def __init__(self, base: int, digits: int) -> None:
        self.base, self.size = base, base**digits
        self.alphabets = [_SYMBOLS[:base]] * digits

    def encode(self, value: Fraction) -> Digits:
        return self._digits(min(max(0, int(value * self.size)), self.size - 1))

    def decode(self, digits: Seq[int]) -> Fraction:
        return Fraction(_number(digits, self.base), self.size)

    def _digits(self, number: int) -> Digits:
        return _digits(number, self.base, len(self.alphabets))


class HammingCode(NormalizedCode):
    """Numbers from 0 to 1 in binary codes that are sorted by their number of ones, then as numbers,
    so that a wrong digit changes the number little.

    Args:
        digits: How many digits.
    """

    def __init__(self, digits: int) -> None:
        super().__init__(2, digits)
        order = sorted(range(self.size), key=lambda code: (bin(code).count("1"), code))
        self._codes = [self._digits(code) for code in order]
        self._ranks = {code: rank for rank, code in enumerate(self._codes)}

    def encode(self, value: Fraction) -> Digits:
        return self._codes[min(max(0, int(value * self.size)), self.size - 1)]

    def decode(self, digits: Seq[int]) -> Fraction:
        return Fraction(self._ranks[tuple(digits)], self.size)


class FloatingCode(NumericCode):
    """Any numbers: sign, sign of the exponent, exponent, and mantissa, of which the first digit
    stands before the point. Numbers that are too small become 0.

    Args:
        base: The base, 2 to 36.
        exponent_digits: How many digits the exponent has.
        digits: How many digits the mantissa has.
    """

    def __init__(self, base: int, exponent_digits: int, digits: int) -> None:
        self.base, self.exponent_digits, self.digits = base, exponent_digits, digits
        self.alphabets = [_SIGNS, _SIGNS] + [_SYMBOLS[:base]] * (exponent_digits + digits)

    def encode(self, value: Fraction) -> Digits:
        size, exponent = abs(value), 0
        if size:
            exponent = _floor_log(size, self.base)
        limit: int = self.base**self.exponent_digits
        if exponent >= limit:
            raise InvalidRequestError(
                f"the number {float(value):g} needs an exponent of more than"
                f" {self.exponent_digits} digits in base {self.base}"
            )
        if not size or exponent <= -limit:
            return (0,) * len(self.alphabets)
        mantissa = int(size / _power(self.base, exponent - self.digits + 1))
        return (
            int(value < 0),
            int(exponent < 0),
            *_digits(abs(exponent), self.base, self.exponent_digits),
            *_digits(mantissa, self.base, self.digits),
        )

    def decode(self, digits: Seq[int]) -> Fraction:
        split = 2 + self.exponent_digits
        exponent = _number(digits[2:split], self.base) * (-1 if digits[1] else 1)
        mantissa = _number(digits[split:], self.base) * (-1 if digits[0] else 1)
        return mantissa * _power(self.base, exponent - self.digits + 1)


class RepeatedCode(NumericCode):
    """The same code several times; in each place the most frequent digit counts, of equally
    frequent ones the smallest.

    Args:
        code: The code.
        times: How many times.
    """

    def __init__(self, code: NumericCode, times: int) -> None:
        self.code, self.times = code, times
        self.alphabets = code.alphabets * times

    def encode(self, value: Fraction) -> Digits:
        return self.code.encode(value) * self.times

    def decode(self, digits: Seq[int]) -> Fraction:
        length = len(self.code.alphabets)
        counts = [Counter(digits[place::length]) for place in range(length)]
        return self.code.decode([min(one, key=lambda d: (-one[d], d)) for one in counts])


def numeric_code(format: str, base: int, digits: int, exponent: int, repeat: int) -> NumericCode:
    """The code with these parameters, which are those of the method `regression`.

    Raises:
        InvalidRequestError: A parameter is out of its range.
    """
    kinds = ("normalized", "floating", "hamming")
    if format not in kinds:
        raise InvalidRequestError(f"format is {format!r}; it may be {', '.join(kinds)}")
    if not 2 <= base <= len(_SYMBOLS) or (format == "hamming" and base != 2):
        allowed = "2" if format == "hamming" else f"2 to {len(_SYMBOLS)}"
        raise InvalidRequestError(f"base is {base}; format {format} allows {allowed}")
    if digits < 1 or exponent < 1 or repeat < 1:
        raise InvalidRequestError(
            f"digits, exponent and repeat must be at least 1, not {digits}, {exponent} and {repeat}"
        )
    if format == "hamming" and digits > _MAX_HAMMING_DIGITS:
        raise InvalidRequestError(
            f"digits is {digits}; format hamming allows up to {_MAX_HAMMING_DIGITS}"
        )
    if (digits + exponent + 2) * repeat > _MAX_LENGTH:
        raise InvalidRequestError(
            f"a number may have up to {_MAX_LENGTH} symbols: use fewer digits"
        )
    code: NumericCode
    if format == "hamming":
        code = HammingCode(digits)
    elif format == "floating":
        code = FloatingCode(base, exponent, digits)
    else:
        code = NormalizedCode(base, digits)
    return code if repeat == 1 else RepeatedCode(code, repeat)


def _digits(number: int, base: int, count: int) -> Digits:
    """The last `count` digits of a number, the most significant first."""
    found = []
    for _ in range(count):
        number, digit = divmod(number, base)
        found.append(digit)
    return tuple(reversed(found))


def _number(digits: Seq[int], base: int) -> int:
    number = 0
    for digit in digits:
        number = number * base + digit
    return number


def _power(base: int, exponent: int) -> Fraction:
    return Fraction(base) ** exponent


def _floor_log(size: Fraction, base: int) -> int:
    """The largest integer e with base ** e <= size. Exact, also for powers of the base."""
    exponent = 0
    while _power(base, exponent + 1) <= size:
        exponent += 1
    while _power(base, exponent) > size:
        exponent -= 1
    return exponent

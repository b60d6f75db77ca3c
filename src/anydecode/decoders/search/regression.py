"""Decoding-based regression (Song and Bahri, "Decoding-based Regression", arXiv:2501.19383).

A model predicts a number as a short code of digits. Its probabilities of all codes are a
distribution of numbers, and the answer is an estimate from that: a mean, a mode or a quantile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from fractions import Fraction
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, Words, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.numeric_codes import Digits, NumericCode, numeric_code
from anydecode.decoders.search.beam import emit_ranked, whole_distribution_sampler
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding, Scores
from anydecode.scoring.sequence import TARGET, Sequence

#: Maximum number of beginnings of codes that are scored side by side.
MAX_BRANCHES = 256
_ESTIMATES = ("mean", "median", "mode")
_FORMATS = ("normalized", "floating", "hamming")

#: From the share of a beginning, the probabilities of its next digits and their text position to
#: the shares of the longer beginnings; None for those that are left out.
Split = Callable[[Any, np.ndarray, int], list[Any]]


@register(
    Card(
        "regression",
        "search",
        paper="Decoding-based Regression (arXiv:2501.19383)",
        exactness="lossy",
        summary="Predicts a number digit by digit, and answers with the mean, the mode or quantiles"
        " of the distribution of all numbers.",
        works_with=("penalties", "guidance", "batches", "adapters"),
        deviations=(
            "the digits are tokens of the model's own vocabulary; the paper's have tokens of their"
            " own",
            "`anydecode train regression` trains an adapter of the model; the paper trains a small"
            " decoder behind an encoder",
            "exponents of powers of the base are exact; in the authors' code 1000 becomes 100",
            "mantissas may begin with a zero; codes of equal numbers count together",
        ),
        remote={
            "estimate": Text(80),
            "format": Words(_FORMATS),
            "base": Range(2, 36),
            "digits": Range(1, 12),
            "exponent": Range(1, 3),
            "repeat": Range(1, 3),
            "low": Range(-1e6, 1e6),
            "high": Range(-1e6, 1e6),
            "samples": Range(0, 64),
        },
    )
)
class Regression(Decoder):
    """An estimate from the distribution of numbers that the model gives after the prompt.

    The text is the code of the number, and its score is the number itself, which need not be on the
    grid of the codes. In each position only the symbols of the code count, in proportion to their
    probabilities at temperature 1; the request's temperature and truncations are ignored. A request
    with `n` above 1 receives the first `n` estimates.

    Args:
        estimate: "mean", "median", "mode", or a number from 0 to 1: the smallest number whose
            cumulative probability is at least that. Several, separated by spaces, are several
            texts.
        format: "normalized": numbers from 0 to 1, the digits behind the point. "hamming": the same
            in binary codes sorted by their number of ones. "floating": any number, as sign, sign of
            the exponent, exponent and mantissa.
        base: The base of the digits, up to 36.
        digits: How many digits; of a floating number, those of the mantissa.
        exponent: How many digits the exponent of a floating number has.
        repeat: How many times the code is written; in each place the most frequent digit counts.
        low: The number that 0 stands for, unless the format is "floating".
        high: The number that 1 stands for, unless the format is "floating".
        samples: How many codes are sampled; 0 to compute the probabilities of all codes.
    """

    def __init__(
        self,
        estimate: str = "median",
        format: str = "normalized",
        base: int = 10,
        digits: int = 3,
        exponent: int = 1,
        repeat: int = 1,
        low: float = 0.0,
        high: float = 1.0,
        samples: int = 0,
    ) -> None:
        self.estimates = [_checked_estimate(one) for one in estimate.split()]
        if not self.estimates:
            raise InvalidRequestError(
                f"estimate is empty; it may be {', '.join(_ESTIMATES)} or a number from 0 to 1"
            )
        if not low < high:
            raise InvalidRequestError(f"low must be below high, not {low:g} and {high:g}")
        self.code = numeric_code(format, base, digits, exponent, repeat)
        self.origin, self.scale = Fraction(0), Fraction(1)
        if format != "floating":
            self.origin, self.scale = Fraction(low), Fraction(high) - Fraction(low)
        self.samples = samples
        rows = 1
        for alphabet in self.code.alphabets[:-1]:
            rows *= len(alphabet)
        if samples == 0 and rows > MAX_BRANCHES:
            raise InvalidRequestError(
                f"regression: these are more than {MAX_BRANCHES} beginnings of numbers; use fewer"
                " digits, or samples"
            )
        if not 0 <= samples <= MAX_BRANCHES:
            raise InvalidRequestError(
                f"regression: samples is {samples}; it may be 0 to {MAX_BRANCHES}"
            )
        self.requirements = Requirements(can_sample=False, max_texts=len(self.estimates))

    def prepare(self, sequence: Sequence) -> None:
        if sequence.compute_logprobs is not None:
            raise UnsupportedCombinationError(
                "regression returns numbers from many texts, which have no log-probabilities: leave"
                " logprobs out"
            )
        self._tokens(sequence)
        sequence.sampler = whole_distribution_sampler(sequence.sampler)

    def decode(self, sequence: Sequence) -> Decoding:
        tokens = self._tokens(sequence)
        drawing: tuple[Split, Any, float] = (_multiply, 1.0, 1.0)
        if self.samples:
            drawing = self._drawing(sequence)
        split, share, total = drawing
        leaves = yield from grow(sequence, tokens, share, split)
        law: dict[Fraction, float] = {}
        for digits, part in leaves.items():
            value = self.code.decode(digits)
            weight = part if self.samples == 0 else len(part)
            law[value] = law.get(value, 0.0) + weight / total
        emit_ranked(sequence, [self._text(one, law, tokens) for one in self.estimates])

    def _tokens(self, sequence: Sequence) -> list[list[int]]:
        """The tokens of the symbols of every position."""
        tokens = symbol_tokens(self.code, sequence.tokenizers[TARGET])
        if sequence.remaining < len(tokens):
            raise InvalidRequestError(
                f"regression: the number has {len(tokens)} tokens, but max_tokens and the context"
                f" leave {sequence.remaining}"
            )
        return tokens

    def _drawing(self, sequence: Sequence) -> tuple[Split, Any, float]:
        """Shares as numbers of samples, each of which draws its digits."""
        noise = sequence.noise.with_purpose("search")

        def draw(numbers: np.ndarray, probabilities: np.ndarray, position: int) -> list[Any]:
            uniform = noise.uniform(numbers, position)
            edges = np.cumsum(probabilities)
            drawn = np.searchsorted(edges, uniform * edges[-1], side="right")
            members = [numbers[drawn == digit] for digit in range(len(probabilities))]
            return [one if len(one) else None for one in members]

        return draw, np.arange(self.samples), float(self.samples)

    def _text(
        self, estimate: str | float, law: dict[Fraction, float], tokens: list[list[int]]
    ) -> RankedText:
        value = summary(law, estimate)
        digits = self.code.encode(value)
        chosen = [row[digit] for row, digit in zip(tokens, digits, strict=True)]
        return RankedText(float(self.origin + self.scale * value), chosen, [])


def symbol_tokens(code: NumericCode, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of the symbols of every position of a code.

    Raises:
        InvalidRequestError: A symbol is not one token.
    """
    found: dict[str, int] = {}
    for symbol in sorted(set("".join(code.alphabets))):
        ids = tokenizer.encode(symbol, special=False)
        if len(ids) != 1 or tokenizer.token_bytes(ids[0]) != symbol.encode():
            raise InvalidRequestError(
                f"regression: this model's tokenizer has no token for {symbol!r}; use another"
                " base or format"
            )
        found[symbol] = ids[0]
    return [[found[symbol] for symbol in row] for row in code.alphabets]


def grow(
    sequence: Sequence, tokens: list[list[int]], share: Any, split: Split
) -> Generator[DecoderAction, ActionResult, dict[Digits, Any]]:
    """The shares of all codes, by breadth-first search of their tree: one pass per position, one
    row per beginning.

    Args:
        sequence: What the codes continue.
        tokens: The allowed tokens of each position.
        share: The share of the empty code.
        split: Divides the share of a beginning among its next digits.
    """
    level: list[tuple[Digits, Any, Sequence]] = [((), share, sequence)]
    leaves: dict[Digits, Any] = {}
    for position, allowed in enumerate(tokens):
        results = yield [branch.score() for _, _, branch in level]
        following: list[tuple[Digits, Any, Sequence]] = []
        for (digits, part, branch), scores in zip(level, results, strict=True):
            law = digit_law(scores, allowed)
            for digit, new in enumerate(split(part, law, sequence.length + position)):
                code = (*digits, digit)
                if new is not None and position + 1 == len(tokens):
                    leaves[code] = new
                elif new is not None:
                    longer = branch.branch()
                    longer.append(allowed[digit])
                    following.append((code, new, longer))
        for _, _, branch in level:
            if branch is not sequence:
                branch.release()
        level = following
    return leaves


def digit_law(scores: Scores, allowed: list[int]) -> np.ndarray:
    """The probabilities of the `allowed` tokens after the last row, relative to each other,
    float64 `[allowed]`."""
    distribution = scores.distribution(-1)
    logits = np.array([distribution.score(token) for token in allowed], np.float64)
    if not np.any(logits > -np.inf):
        raise ConstraintError("the constraint allows none of the digits that may come here")
    weights: np.ndarray = np.exp(logits - logits.max())
    return weights / weights.sum()


def summary(law: dict[Fraction, float], estimate: str | float) -> Fraction:
    """The mean, the mode (of equally probable numbers the smallest) or a quantile of numbers with
    these probabilities."""
    values = sorted(law)
    if estimate == "mean":
        return Fraction(sum(float(value) * law[value] for value in values))
    if estimate == "mode":
        return max(values, key=lambda value: law[value])
    cumulative = np.cumsum([law[value] for value in values])
    level = 0.5 if estimate == "median" else float(estimate)
    found = int(np.searchsorted(cumulative, level * cumulative[-1] * (1 - 1e-12)))
    return values[min(found, len(values) - 1)]


def _multiply(share: float, probabilities: np.ndarray, position: int) -> list[float | None]:
    return [share * float(one) or None for one in probabilities]


def _checked_estimate(word: str) -> str | float:
    if word in _ESTIMATES:
        return word
    try:
        level = float(word)
    except ValueError:
        level = -1.0
    if not 0 <= level <= 1:
        raise InvalidRequestError(
            f"estimate is {word!r}; it may be {', '.join(_ESTIMATES)} or a number from 0 to 1"
        )
    return level

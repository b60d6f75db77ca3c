"""Oracle test of regression (Song and Bahri, arXiv:2501.19383): estimates from all codes, each
scored from its first token, and a second implementation of the codes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text, fit
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.decoders.framework.numeric_codes import NumericCode, numeric_code
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

PROMPT = list(b"y = ")
#: From a code to its number.
Value = Callable[[str], float]
Law = dict[float, float]


def fraction(base: int) -> Value:
    """The digits behind the point."""
    return lambda code: sum(int(digit, base) * base**-i for i, digit in enumerate(code, 1))


def hamming(code: str) -> float:
    """The share of codes that have fewer ones, or as many and come earlier."""
    others = ["".join(bits) for bits in product("01", repeat=len(code))]
    return sum((one.count("1"), one) < (code.count("1"), code) for one in others) / len(others)


def floating(base: int, exponent: int) -> Value:
    """Sign, sign of the exponent, exponent, mantissa with one digit before the point."""

    def value(code: str) -> float:
        power = int(code[2 : 2 + exponent], base) * (-1 if code[1] == "-" else 1)
        mantissa = int(code[2 + exponent :], base) / base ** (len(code) - 3 - exponent)
        return (-1 if code[0] == "-" else 1) * mantissa * float(base) ** power

    return value


def voted(value: Value, times: int) -> Value:
    """The most frequent digit of each place, of equally frequent ones the smallest."""

    def of(code: str) -> float:
        length, digits = len(code) // times, ""
        for place in range(length):
            counts = Counter(code[place::length])
            digits += min(counts, key=lambda digit: (-counts[digit], digit))
        return value(digits)

    return of


def numbers(model: ScriptedModel, alphabets: list[str], value: Value) -> Law:
    """The probability of every number: the digits of each code, one after the other."""
    found: Law = defaultdict(float)
    for code in map("".join, product(*alphabets)):
        probability = 1.0
        for i, symbol in enumerate(code):
            logits = logits_after(model, PROMPT + list(code[:i].encode()))
            weights = {one: math.exp(logits[ord(one)]) for one in alphabets[i]}
            probability *= weights[symbol] / sum(weights.values())
        found[value(code)] += probability
    return dict(found)


def estimate(law: Law, kind: str) -> float:
    """A mean, mode or quantile."""
    if kind == "mean":
        return sum(number * probability for number, probability in law.items())
    if kind == "mode":
        best = max(law.values())
        return min(number for number in law if law[number] > best - 1e-12)
    level, total = 0.5 if kind == "median" else float(kind), 0.0
    for number in sorted(law):
        total += law[number]
        if total >= level - 1e-9:
            return number
    return max(law)


KINDS = "median mean mode 0.1 0.9"
#: By name: parameters, alphabets, and the number of a code.
SETTINGS: dict[str, tuple[str, list[str], Value]] = {
    "base 2": ("base=2,digits=6", ["01"] * 6, fraction(2)),
    "base 3": ("base=3,digits=4", ["012"] * 4, fraction(3)),
    "hamming": ("format=hamming,base=2,digits=5", ["01"] * 5, hamming),
    "floating": (
        "format=floating,base=3,digits=2,exponent=1", ["+-", "+-", "012", "012", "012"],
        floating(3, 1),
    ),
    "repeated": ("base=2,digits=2,repeat=3", ["01"] * 6, voted(fraction(2), 3)),
}  # fmt: skip


def code_checks() -> Iterator[Check]:
    """Codes of powers and of a grid: round trips, their error, and their order."""
    wrong = [
        (base, exponent)
        for base in (2, 3, 10, 16)
        for exponent in range(-9, 10)
        for code in [numeric_code("floating", base, 4, 4, 1)]
        if code.decode(code.encode(_power(base, exponent))) != _power(base, exponent)
    ]
    yield Check("powers of the base are exact", not wrong, f"{wrong}")
    for name, base, digits in (("normalized", 10, 3), ("normalized", 2, 7), ("hamming", 2, 7)):
        code = numeric_code(name, base, digits, 1, 1)
        yield Check(f"codes of {base}^{digits}, {name}", _fits_grid(code, base**digits))
    ordered = numeric_code("normalized", 7, 3, 1, 1)
    codes = [ordered.encode(_power(2, -11) * i) for i in range(2049)]
    yield Check("larger numbers have larger codes", codes == sorted(codes))


def _power(base: int, exponent: int) -> Fraction:
    return Fraction(base**exponent) if exponent >= 0 else Fraction(1, base**-exponent)


def _fits_grid(code: NumericCode, size: int) -> bool:
    """Whether every number is between its code's and the next one's."""
    grid = [_power(2, -14) * i for i in range(1 << 14)]
    return all(0 <= one - code.decode(code.encode(one)) < _power(size, -1) for one in grid)


@oracle_test("regression")
def regression() -> Iterator[Check]:
    """All estimates of the oracle, the law of sampled codes, and the codes."""
    wrong: Counter[str] = Counter()
    for seed in range(3):
        model = ScriptedModel(seed=seed, memory=3)
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
            law = numbers(model, ["0123456789"] * 3, fraction(10))
            found = llm.generate(PROMPT, decoder="regression", max_tokens=8)
            expected = estimate(law, "median")
            wrong["the default build"] += (
                abs((found.score or 0.0) - expected) > 1e-9 or found.text != f"{expected:.3f}"[2:]
            )
            for name, (parameters, alphabets, value) in SETTINGS.items():
                law = numbers(model, alphabets, value)
                decoder = f"regression:{parameters},estimate={KINDS}"
                samples = llm.generate(PROMPT, decoder=decoder, n=5).samples
                for kind, one in zip(KINDS.split(), samples, strict=True):
                    near = abs((one.score or 0.0) - estimate(law, kind)) < 1e-9
                    wrong[name] += not near or len(one.text) != len(alphabets)
            scaled = llm.generate(PROMPT, decoder="regression:low=-5,high=15").score or 0.0
            wrong["other bounds"] += abs(scaled - (20 * expected - 5)) > 1e-9
    for name in ("the default build", *SETTINGS, "other bounds"):
        yield Check(f"{name} equals the oracle", not wrong[name], f"{wrong[name]} wrong")
    yield drawn_codes()
    yield from code_checks()


def drawn_codes() -> Check:
    """One sample is one draw of the law of all numbers."""
    model = ScriptedModel(seed=4, memory=3)
    law = numbers(model, ["012"] * 2, fraction(3))
    expected: dict[Text, float] = {
        (round(9 * number),): probability for number, probability in law.items()
    }
    decoder = "regression:base=3,digits=2,samples=1,estimate=mode"
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        scores = [llm.generate(PROMPT, decoder=decoder, seed=i).score or 0.0 for i in range(400)]
    result = fit([(round(9 * score),) for score in scores], expected)
    return Check("law of a sampled number", result.passed, str(result))


@measure("regression", "mean error of the number, less that of greedy digits", samples=8, margin=0)
def regression_gain(samples: int) -> float:
    """The expected distance to numbers that follow the model's own law, of the default build's
    answer and of the number with the most probable digits."""
    losses = []
    for seed in range(samples):
        model = ScriptedModel(seed=seed, memory=3)
        law = numbers(model, ["0123456789"] * 3, fraction(10))
        greedy = ""
        for _ in range(3):
            logits = log_softmax(logits_after(model, PROMPT + list(greedy.encode())))
            greedy += max("0123456789", key=lambda digit: logits[ord(digit)])
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
            answer = llm.generate(PROMPT, decoder="regression").score or 0.0
        errors = [
            sum(abs(number - guess) * probability for number, probability in law.items())
            for guess in (answer, fraction(10)(greedy))
        ]
        losses.append(errors[0] - errors[1])
    return float(np.mean(losses))

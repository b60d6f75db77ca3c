"""Pearson's chi-square test of samples against a known distribution, over texts so short and a
vocabulary so small that all outcomes can be enumerated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.sampler import Sampler

#: Significance level: the probability that a correct rule fails one test.
LEVEL = 1e-3
#: Outcomes with a smaller expected count are merged into one cell.
MIN_EXPECTED = 5.0

VOCABULARY, LENGTH, SAMPLES = 5, 3, 400
PROMPT = [1, 0, 3]

Text = tuple[int, ...]
Script = Callable[[Text], np.ndarray]


@dataclass(frozen=True)
class Fit:
    """The result of a test. `probability` is the p-value: the probability of an equal or worse fit
    if the samples follow the distribution."""

    statistic: float
    degrees: int
    probability: float
    samples: int

    @property
    def passed(self) -> bool:
        return self.probability > LEVEL

    def __str__(self) -> str:
        return (
            f"chi-square {self.statistic:.1f} on {self.degrees} degrees of freedom,"
            f" p = {self.probability:.2g}, {self.samples} samples"
        )


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x), the regularized upper incomplete gamma function: a series below a + 1, Lentz's
    continued fraction above it (DLMF 8.11.4 and 8.9.2)."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while abs(term) > 1e-16 * abs(total):
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - scale * total)
    b = x + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * fraction


def fit(observed: Iterable[Text], expected: Mapping[Text, float]) -> Fit:
    """Tests samples against `expected` (probabilities by outcome, summing to one). If an impossible
    outcome was observed, the p-value is 0."""
    counts = Counter(observed)
    total = sum(counts.values())
    if any(expected.get(text, 0.0) <= 0 for text in counts):
        return Fit(math.inf, 0, 0.0, total)
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for text, probability in expected.items():
        cell = (float(counts[text]), total * probability)
        if cell[1] >= MIN_EXPECTED:
            cells.append(cell)
        else:
            rest[0] += cell[0]
            rest[1] += cell[1]
    if rest[1] >= MIN_EXPECTED:
        cells.append((rest[0], rest[1]))
    elif cells and rest[1]:
        count, expected_count = cells.pop()
        cells.append((count + rest[0], expected_count + rest[1]))
    statistic = sum(
        (count - expected_count) ** 2 / expected_count for count, expected_count in cells
    )
    degrees = max(1, len(cells) - 1)
    return Fit(statistic, degrees, upper_gamma(degrees / 2, statistic / 2), total)


def bigram_logits(vocab_size: int, *seed: int, spread: float = 1.2) -> Script:
    """Random logits `[vocab_size]` that depend on the last two tokens."""
    rows: dict[Text, np.ndarray] = {}

    def logits(seen: Text) -> np.ndarray:
        key = tuple(int(token) for token in seen[-2:])
        if key not in rows:
            drawn = np.random.default_rng([*seed, len(key), *key]).normal(size=vocab_size)
            rows[key] = (spread * drawn).astype(np.float32)
        return rows[key]

    return logits


def enumerated(
    script: Script, prompt: list[int], sampler: Sampler, length: int
) -> dict[Text, float]:
    """The probability of every text of `length` tokens after `prompt`."""
    texts: dict[Text, float] = {}

    def grow(text: Text, state: Sampler, probability: float) -> None:
        if len(text) == length:
            texts[text] = probability
            return
        logits = script((*prompt, *text))
        dense = state.distribution(logits).dense(len(logits))
        for token in np.flatnonzero(dense):
            branch = state.fork()
            branch.distribution(logits)  # some samplers adapt to the distributions they return
            branch.advance(int(token))
            grow((*text, int(token)), branch, probability * float(dense[token]))

    grow((), sampler, 1.0)
    return texts


class Alternating:
    """A small grammar: after an odd token comes an even one, and 0 may stand anywhere but never
    twice in a row."""

    def __init__(self, vocab_size: int = VOCABULARY, last: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.last = last

    def mask(self) -> np.ndarray:
        """The allowed tokens: bool `[vocab_size]`."""
        tokens = np.arange(self.vocab_size)
        allowed = np.ones(self.vocab_size, bool)
        if self.last is not None:
            allowed = (tokens != self.last) if self.last == 0 else np.ones(self.vocab_size, bool)
            if self.last % 2:
                allowed = tokens % 2 == 0
        return allowed

    def advance(self, token: int) -> None:
        self.last = token

    def fork(self) -> Alternating:
        return Alternating(self.vocab_size, self.last)


#: Sampling options of the tests. Logits processors must act on the drafter and the target alike.
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7 with top-p": {"temperature": 0.7, "top_p": 0.8},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "a grammar": {"temperature": 0.9, "constraint": Alternating()},
}


TARGET_SCRIPT = bigram_logits(VOCABULARY, 4)
DRAFT_SCRIPT = bigram_logits(VOCABULARY, 5)


def small_llm() -> LLM:
    """A target and a draft model over five tokens, so different that drafts are often rejected."""
    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    draft = ScriptedModel(DRAFT_SCRIPT, vocab_size=VOCABULARY)
    return LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=8192)


def sampled(
    llm: LLM,
    decoder: Decoder,
    options: Mapping[str, Any],
    samples: int = SAMPLES,
    seed: int = 17,
    prompt: Seq[int] = PROMPT,
) -> list[Text]:
    """The token sequences of `samples` samples of one request."""
    settings = {"temperature": 1.0, **options}
    answer = llm.generate(
        list(prompt), decoder=decoder, n=samples, seed=seed, max_tokens=LENGTH, **settings
    )
    return [tuple(sample.tokens) for sample in answer.samples]


def expected(
    options: Mapping[str, Any], prompt: Seq[int] = PROMPT, script: Script = TARGET_SCRIPT
) -> dict[Text, float]:
    """The exact distribution of the texts that `sampled` returns, of a target with the logits
    `script`."""
    settings = {"temperature": 1.0, **options}
    constraint = settings.pop("constraint", None)
    sampler = SamplingParams(**settings).sampler(
        list(prompt), VOCABULARY, constraint=constraint and constraint.fork()
    )
    return enumerated(script, list(prompt), sampler, LENGTH)


def distribution_fits(make: Callable[[], Decoder], samples: int = SAMPLES) -> dict[str, Fit]:
    """Chi-square tests of a decoder's texts against the target's distribution, one per set of
    sampling options."""
    fits = {}
    for name, options in SAMPLING_OPTIONS.items():
        with small_llm() as llm:
            fits[name] = fit(sampled(llm, make(), options, samples), expected(options))
    return fits

"""Mirostat: truncation with feedback control that keeps the surprise of the text at a target.

Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", 2020,
arXiv 2007.14966. `mu` starts at twice the target and moves against the surprise of each token.
"""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.kernels import portable
from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Candidates, descending, largest
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor

#: How many of the most probable tokens version 1 fits Zipf's law to.
ZIPF_TOKENS = 100


class Mirostat(LogitsProcessor):
    """Version 2: drops tokens whose surprise, -log2 p in bits, exceeds `mu` (at least one is kept).

    Surprise is measured before the truncation. `mu` is clipped to between 0 and four times `target`
    to avoid windup when the target cannot be reached; the paper has no such bounds.

    Args:
        target: Target surprise in bits per token.
        rate: Learning rate of `mu`.
    """

    is_stateful = True
    learns_from_logits = True

    def __init__(self, target: float = 5.0, rate: float = 0.1) -> None:
        self.target = target
        self.rate = rate
        self.mu = 2 * target
        self._tokens: np.ndarray | None = None
        self._surprise: np.ndarray | None = None  # of the last distribution, in bits

    def apply(self, candidates: Candidates) -> Candidates:
        scores = candidates.scores
        _, total = exponentials(scores)
        offset = np.float32(float(scores.max()) + float(portable.log(total)))
        self._surprise = (offset - scores) * np.float32(1 / math.log(2))
        self._tokens = candidates.tokens
        return candidates.keep(self._kept(scores, self._surprise))

    def advance(self, token: int) -> None:
        surprise = self._surprise_of(token)
        self._tokens = self._surprise = None
        if surprise is not None:
            moved = self.mu - self.rate * (surprise - self.target)
            self.mu = min(max(moved, 0.0), 4 * self.target)

    def fork(self) -> Mirostat:
        branch = object.__new__(type(self))
        branch.__dict__.update(self.__dict__)
        return branch

    def _kept(self, scores: np.ndarray, surprise: np.ndarray) -> np.ndarray:
        kept = np.flatnonzero(surprise <= np.float32(self.mu))
        return kept if len(kept) else np.array([scores.argmax()])

    def _surprise_of(self, token: int) -> float | None:
        """The surprise of `token`, or None if it was not a candidate or there was no distribution
        (forced tokens)."""
        if self._surprise is None:
            return None
        if self._tokens is None:
            return float(self._surprise[token])
        position = int(np.searchsorted(self._tokens, token))
        if position == len(self._tokens) or self._tokens[position] != token:
            return None
        return float(self._surprise[position])


class MirostatZipf(Mirostat):
    """Version 1: the k most probable tokens, with k from Zipf's law fitted to the row so that
    their expected surprise comes to `mu` bits."""

    def _kept(self, scores: np.ndarray, surprise: np.ndarray) -> np.ndarray:
        return largest(scores, self._count(scores))

    def _count(self, scores: np.ndarray) -> int:
        size = len(scores)
        head = scores[largest(scores, ZIPF_TOKENS)]
        ordered = head[descending(head)].astype(np.float64)
        if len(ordered) < 2:
            return size
        steps = np.arange(len(ordered) - 1)
        t = np.log((steps + 2) / (steps + 1))
        exponent = float((t * -np.diff(ordered)).sum() / (t * t).sum())
        if exponent < 1e-6:
            return size
        excess = exponent - 1
        if abs(excess) < 1e-6:
            factor = 1 / math.log(size)
        else:
            factor = excess / -math.expm1(-excess * math.log(size))
        log_count = (math.log(factor) + self.mu * math.log(2)) / exponent
        return max(1, round(math.exp(min(log_count, math.log(size)))))


@register(
    Card(
        "mirostat",
        "sampling",
        paper="Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
        " (arXiv:2007.14966)",
        exactness="lossy",
        summary="Truncates so that the surprise of the text stays at `tau` bits per token.",
        works_with=WORKS_WITH,
        deviations=(
            "version 2, from the authors' later code, unless version=1 is set",
            "the defaults are tau = 5 bits and eta = 0.1, as in llama.cpp; the paper has 3 and 1."
            " Where the model's entropy is below tau, nothing is truncated",
            "mu is clipped to between 0 and 4 tau, to avoid windup at targets out of reach",
            "surprise is measured after penalties, constraint and temperature, on allowed tokens",
            "version 1 keeps k tokens, where the authors' code keeps k + 1",
        ),
        remote={"tau": Range(0, 100), "eta": Range(0, 100), "version": Range(1, 2)},
    )
)
def mirostat(tau: float = 5.0, eta: float = 0.1, version: int = 2) -> SamplerPreset:
    """Mirostat sampling.

    Args:
        tau: Target surprise in bits per token.
        eta: Learning rate.
        version: 1 or 2.
    """
    options = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta}
    return SamplerPreset("mirostat", options)

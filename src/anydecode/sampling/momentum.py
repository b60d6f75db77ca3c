"""Momentum decoding: greedy search with a penalty on repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.kernels.library import exponentials
from anydecode.sampling.candidates import Candidates, largest
from anydecode.sampling.history import History
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor

#: Resistance of a token by the length of the n-gram that it would repeat; the paper's for GPT-2.
RESISTANCE = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


class Momentum(LogitsProcessor):
    """Keeps one token: among the `k` most probable, the one with the highest
    p - alpha * resistance[d], where d is the length of the longest n-gram ending in it that has
    already occurred in prompt or output (Lan et al., "Momentum decoding", 2022, arXiv 2212.02175).
    Ties to the lower id.

    Args:
        alpha: Weight of the resistance.
        k: Number of tokens to consider.
        resistance: Resistance by d, starting with 0.
        prompt: Token ids of the prompt.
    """

    is_stateful = True

    def __init__(
        self,
        alpha: float = 0.2,
        k: int = 5,
        resistance: Sequence[float] = RESISTANCE,
        prompt: Sequence[int] = (),
    ) -> None:
        self.alpha, self.k = alpha, k
        self.resistance = tuple(resistance)
        self._history = History(prompt)

    def apply(self, candidates: Candidates) -> Candidates:
        candidates = candidates.allowed()
        weights, total = exponentials(candidates.scores)
        positions = largest(candidates.scores, self.k)
        tokens = positions if candidates.tokens is None else candidates.tokens[positions]
        resisted = [self.resistance[self.depth(int(token))] for token in tokens]
        values = weights[positions] / total - self.alpha * np.array(resisted)
        return candidates.keep(positions[[int(values.argmax())]])

    def depth(self, token: int) -> int:
        """Length of the longest repeated n-gram that `token` would end, at most the last index of
        the resistance table."""
        tokens = self._history.tokens
        ends = np.flatnonzero(tokens == token)
        for length in range(1, len(self.resistance)):
            if not len(ends):
                return length - 1
            ends = ends[ends >= length]
            if length <= len(tokens):
                ends = ends[tokens[ends - length] == tokens[len(tokens) - length]]
        return len(self.resistance) - 1

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> Momentum:
        branch = object.__new__(Momentum)
        branch.__dict__.update(self.__dict__)
        branch._history = self._history.fork()
        return branch


@register(
    Card(
        "momentum",
        "sampling",
        paper="Momentum Decoding: Open-ended Text Generation As Graph Exploration"
        " (arXiv:2212.02175)",
        exactness="lossy",
        summary="Greedy search that penalises tokens which repeat n-grams.",
        works_with=WORKS_WITH,
        deviations=(
            "n-grams longer than the resistance table get its last value; the paper's resistance"
            " becomes infinite",
            "the k most probable tokens are taken among those that penalties and constraint allow",
        ),
        remote={"alpha": Range(0, 100), "k": Range(1, 1024)},
    )
)
def momentum(alpha: float = 0.2, k: int = 5) -> SamplerPreset:
    """Momentum decoding.

    Args:
        alpha: Weight of the resistance against the probability.
        k: Number of most probable tokens to consider.
    """
    return SamplerPreset(
        "momentum", {"momentum_alpha": alpha, "momentum_k": k}, needs_temperature=False
    )

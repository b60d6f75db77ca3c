"""Top-W: truncation by the distances between the embeddings of tokens.

"Top-W", 2026, arXiv 2602.10346. The kept set S minimises W1(p, p|S) + entropy_weight * H(p|S) -
mass_weight * ln p(S), with the transport cost bounded by the distance to the nearest kept token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.sampling.candidates import Candidates, descending, largest
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import log_probabilities


@dataclass(frozen=True, eq=False)
class Geometry:
    """A model's token embeddings, float32 `[vocab_size, hidden_size]`, with their mean and standard
    deviation per dimension, float32 `[hidden_size]`. Created once per model."""

    embeddings: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def of(embeddings: np.ndarray) -> Geometry:
        deviation = embeddings.std(0)
        return Geometry(embeddings, embeddings.mean(0), np.where(deviation > 0, deviation, 1))

    def cosines(self, tokens: np.ndarray) -> np.ndarray:
        """float32 `[len(tokens), len(tokens)]`: cosines of the standardised embeddings."""
        rows = (self.embeddings[tokens] - self.mean) / self.deviation
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        cosines: np.ndarray = rows @ rows.T
        return cosines


@dataclass(frozen=True, eq=False)
class TopW(LogitsProcessor):
    """Keeps the set found by alternately computing distances to the set and the best set for these
    distances.

    If `mass_weight` is at least `entropy_weight`, the best set is a prefix of the tokens by
    descending potential, found in one scan; else it is a single token (the best by the objective,
    not by potential alone). Probabilities are those after the temperature.

    Args:
        geometry: The model's embeddings.
        entropy_weight: Weight of the entropy of the kept set.
        mass_weight: Weight of the log mass of the kept set.
        distance_weight: Weight of the embedding distance to the kept set.
        pool: Only this many most probable tokens are considered.
        start_mass: Probability mass of the initial set.
        rounds: Maximum number of alternations.
    """

    geometry: Geometry
    entropy_weight: float = 2.2
    mass_weight: float = 2.8
    distance_weight: float = 0.6
    pool: int = 1200
    start_mass: float = 0.999
    rounds: int = 9

    def apply(self, candidates: Candidates) -> Candidates:
        positions = largest(candidates.scores, self.pool)
        tokens = positions if candidates.tokens is None else candidates.tokens[positions]
        log_all, p_all = log_probabilities(candidates.scores)
        possible = p_all[positions] > 0  # probabilities far below the best underflow in float32
        positions, tokens = positions[possible], tokens[possible]
        log_p, p = log_all[positions].astype(np.float64), p_all[positions].astype(np.float64)
        distance = 1 - self.geometry.cosines(tokens)
        kept = self._start(p)
        for _ in range(self.rounds):
            potential = self.entropy_weight * log_p
            potential -= self.distance_weight * distance[:, kept].min(axis=1)
            better = best_set(p, potential, self.mass_weight - self.entropy_weight)
            if np.array_equal(better, kept):
                break
            kept = better
        return candidates.keep(positions[kept])

    def _start(self, p: np.ndarray) -> np.ndarray:
        order = descending(p)
        sums = np.cumsum(p[order])
        return np.sort(order[: int(np.searchsorted(sums, self.start_mass * sums[-1])) + 1])


def best_set(p: np.ndarray, potential: np.ndarray, mass_weight: float) -> np.ndarray:
    """Indices, ascending, of the set that maximises mean potential + mass_weight * ln(mass), ties
    to the largest set. `p` must be above 0."""
    if mass_weight < 0:
        return np.array([(potential + mass_weight * np.log(p)).argmax()])
    order = descending(potential)
    mass = np.cumsum(p[order])
    value = np.cumsum((p * potential)[order]) / mass + mass_weight * np.log(mass)
    return np.sort(order[: len(value) - int(value[::-1].argmax())])


@register(
    Card(
        "top-w",
        "sampling",
        paper="Top-W, geometry-aware truncation by Wasserstein distance (arXiv:2602.10346)",
        exactness="lossy",
        summary="Keeps the set with the best balance of embedding distance, entropy and mass.",
        needs=("a model whose embeddings can be read",),
        works_with=WORKS_WITH,
        deviations=(
            "if the mass weight is below the entropy weight, the optimum is a single token; the"
            " paper names the token of largest potential, but enumeration of all subsets shows that"
            " it is the one that maximises potential + (mass - entropy) ln p, which is used",
            "of several equally good sets the largest is kept",
            "selection uses the probabilities at the sampling temperature (the paper's T_sel = T)",
            "only the nearest-neighbour potential is implemented, not the k-neighbour and exact"
            " ones",
        ),
        remote={"entropy": Range(0, 100), "mass": Range(0, 100)},
    )
)
def top_w(entropy: float = 2.2, mass: float = 2.8) -> SamplerPreset:
    """Top-W sampling.

    Args:
        entropy: Weight of the entropy of the kept set.
        mass: Weight of its log mass.
    """
    return SamplerPreset("top-w", {"top_w": True, "top_w_entropy": entropy, "top_w_mass": mass})

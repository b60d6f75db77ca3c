"""Oracle of top-w (Top-W, arXiv:2602.10346): the alternating optimization with the best of all
subsets; and the objective relative to the nucleus from which it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.token_sets import (
    descending,
    renormalized,
    tempered,
    up_to,
)
from anydecode.certification.samplers import OracleContext, oracle, softmax
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.top_w import Geometry, TopW, best_set


def embedding_distances(embeddings: np.ndarray) -> np.ndarray:
    """float64 `[tokens, tokens]`: 1 minus the cosine of the standardized embeddings."""
    table = embeddings.astype(np.float64)
    rows = (table - table.mean(0)) / table.std(0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    distances: np.ndarray = 1 - rows @ rows.T
    return distances


def alternation(
    p: np.ndarray, distances: np.ndarray, kept: list[int], entropy: float, mass: float
) -> list[int]:
    """The alternating optimization from `kept`, with the best set found among all subsets."""
    subsets = [[t for t in range(len(p)) if bits >> t & 1] for bits in range(1, 1 << len(p))]
    for _ in range(9):
        potential = entropy * np.log(p) - 0.6 * distances[:, kept].min(1)

        def value(chosen: list[int], potential: np.ndarray = potential) -> float:
            total = float(p[chosen].sum())
            mean = float((p[chosen] * potential[chosen]).sum()) / total
            return mean + (mass - entropy) * math.log(total)

        better = max(subsets, key=lambda chosen: (round(value(chosen), 9), len(chosen)))
        if sorted(better) == sorted(kept):
            break
        kept = better
    return sorted(kept)


@oracle("top-w", {"entropy": 0.9, "mass": 1.2}, {"entropy": 2.2, "mass": 1.0}, {})
def top_w_probabilities(
    context: OracleContext, tokens: Text, entropy: float = 2.2, mass: float = 2.8
) -> np.ndarray:
    """The alternating optimization from the nucleus of mass 0.999."""
    p = tempered(context, tokens)
    start = up_to(descending(p), p, 0.999)
    distances = embedding_distances(context.model.embeddings)
    return renormalized(p, alternation(p, distances, start, entropy, mass))


def objective(p: np.ndarray, distance: np.ndarray, kept: np.ndarray, rule: TopW) -> float:
    """The objective that top-w minimizes, with the rule's weights: transport to the kept set
    (bounded by the nearest token) + entropy - log mass."""
    mass = float(p[kept].sum())
    q = p[kept] / mass
    moved = float((p * distance[:, kept].min(1)).sum())
    entropy = -float((q * np.log(q)).sum())
    cost = rule.distance_weight * moved + rule.entropy_weight * entropy
    return cost - rule.mass_weight * math.log(mass)


@oracle_test("top-w")
def top_w() -> Iterator[Check]:
    """The best set against all sets; and the token named in the paper, which is not optimal where
    the mass weighs less than the entropy."""
    rng = np.random.default_rng(5)
    subsets = [[i for i in range(7) if bits >> i & 1] for bits in range(1, 128)]
    for weight in (-1.2, -0.4, 0.0, 0.6):
        right, named = 0, 0
        for _ in range(25):
            p, potential = rng.dirichlet(np.ones(7)), rng.normal(size=7)

            def value(
                chosen: list[int],
                p: np.ndarray = p,
                potential: np.ndarray = potential,
                weight: float = weight,
            ) -> float:
                mass = float(p[chosen].sum())
                return float((p * potential)[chosen].sum()) / mass + weight * math.log(mass)

            best = max(map(value, subsets))
            right += value(best_set(p, potential, weight).tolist()) > best - 1e-9
            named += value([int(potential.argmax())]) > best - 1e-9
        yield Check(
            f"weight {weight}: equal to the best of all sets", right == 25, f"{right} of 25"
        )
        if weight < 0:
            named_text = f"argmax of the potential is best in {named} of 25"
            yield Check(
                f"weight {weight}: the paper's token is not always best", named < 25, named_text
            )
    yield _distances()


def _distances() -> Check:
    """Starts from half of the mass, where the distances decide: from a nucleus of nearly all tokens
    they rarely do."""
    rng = np.random.default_rng(6)
    wrong = decided = 0
    for _ in range(20):
        embeddings = rng.normal(size=(8, 5)).astype(np.float32)
        row = rng.normal(size=8).astype(np.float32)
        rule = TopW(Geometry.of(embeddings), entropy_weight=0.2, mass_weight=0.3, start_mass=0.5)
        kept = Sampler(1.0, post_temperature=[rule]).distribution(row).dense(8) > 0
        p, distances = softmax(row), embedding_distances(embeddings)
        start = up_to(descending(p), p, 0.5)
        expected = alternation(p, distances, start, 0.2, 0.3)
        wrong += np.flatnonzero(kept).tolist() != expected
        decided += alternation(p, 0 * distances, start, 0.2, 0.3) != expected
    detail = f"{wrong} of 20 wrong, {decided} decided by the distances"
    return Check("the kept set depends on the distances", wrong == 0 < decided, detail)


def top_w_gain(samples: int, rule: LogitsProcessor | None = None) -> float:
    """The mean of the objective minus that of the nucleus from which the rule starts."""
    rng = np.random.default_rng(1)
    centres = np.repeat(rng.normal(size=(8, 12)), 5, axis=0)
    embeddings = (centres + 0.2 * rng.normal(size=(40, 12))).astype(np.float32)
    geometry, distance = Geometry.of(embeddings), embedding_distances(embeddings)
    change = 0.0
    reference = TopW(geometry)
    for _ in range(samples):
        row = rng.normal(0, 1.5, 40).astype(np.float32)
        p = softmax(row)
        after = [TopW(geometry)] if rule is None else [rule]
        kept = Sampler(1.0, post_temperature=after).distribution(row).tokens
        start = np.sort(np.argsort(-p)[: int(np.searchsorted(np.cumsum(-np.sort(-p)), 0.999)) + 1])
        whole = np.arange(40) if kept is None else kept
        change += objective(p, distance, whole, reference) - objective(
            p, distance, start, reference
        )
    return change / samples


@measure("top-w", "objective relative to the initial nucleus", samples=40, margin=-0.05)
def top_w_claim(samples: int) -> float:
    """Distance, entropy and mass together improve."""
    return top_w_gain(samples)

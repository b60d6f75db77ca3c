"""Acceptance rules over all outcomes: every draw of siblings and every decision, with its
probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from anydecode.certification.chi_square import DRAFT_SCRIPT, VOCABULARY, Script
from anydecode.decoders.framework.rejection import rejection_steps
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: An acceptance ladder: from p, q, the kind and the siblings to acceptance probabilities and
#: residuals.
Ladder = Callable[[np.ndarray, np.ndarray, str, list[int]], Iterator[tuple[float, np.ndarray]]]


def draws(q: np.ndarray, kind: str, width: int) -> Iterator[tuple[float, list[int]]]:
    """Every way in which `width` siblings can be drawn from `q`, with its probability."""
    if kind == "point":
        yield 1.0, [int(token) for token in np.argsort(-q, kind="stable")[:width]]
        return
    for tokens in product(range(len(q)), repeat=width):
        left: np.ndarray | None = q
        probability = 1.0
        for token in tokens:
            probability *= 0.0 if left is None else float(left[token])
            if kind == "wor" and left is not None and probability:
                left = np.where(np.arange(len(left)) == token, 0.0, left)
                left = left / left.sum() if left.any() else None
        if probability > 0:
            yield probability, list(tokens)


def outcome(
    p: np.ndarray, q: np.ndarray, kind: str, width: int, rungs: Ladder = rejection_steps
) -> np.ndarray:
    """The distribution of the token that a rule emits, summed over all draws and accept decisions:
    float64 `[vocab_size]`."""
    distribution = np.zeros(len(p))
    for probability, tokens in draws(q, kind, width):
        rest = p
        for token, (acceptance, after) in zip(tokens, rungs(p, q, kind, tokens), strict=True):
            distribution[token] += probability * acceptance
            probability *= 1 - acceptance
            rest = after
        distribution += probability * rest
    return distribution


def cases(count: int = 12, size: int = 5) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of distributions: random ones, some with zeros, and some that are equal."""
    random = np.random.default_rng(8)
    for number in range(count):
        p, q = random.dirichlet(np.full(size, 0.7), 2)
        if number % 3 == 1:
            p[number % size] = 0
            q[(number + 1) % size] = 0
        yield p / p.sum(), (p if number % 4 == 3 else q) / (p if number % 4 == 3 else q).sum()


class TableTrees(Drafter):
    """Drafter of trees with two levels of `width` siblings under every node, drawn from a table as
    `kind` says."""

    def __init__(self, kind: str, width: int = 2, script: Script = DRAFT_SCRIPT) -> None:
        self.kind = kind
        self.width = width
        self.script = script

    def open(self, sequence: Sequence) -> DraftSession:
        return TableSession(self, sequence)


class TableSession(DraftSession):
    def __init__(self, drafter: TableTrees, sequence: Sequence) -> None:
        self.drafter = drafter
        self.sequence = sequence

    def propose(self, size: int) -> Proposal:
        tree = TokenTree(kind=self.drafter.kind)
        level: list[tuple[int, list[int], Sampler]] = [(ROOT, [], self.sequence.sampler.fork())]
        for _ in range(2):
            grown = []
            for node, path, sampler in level:
                seen = (*self.sequence.all_tokens, *path)
                q = sampler.distribution(self.drafter.script(seen)).dense(VOCABULARY)
                tree.probabilities[node] = q
                for token in self._siblings(q, len(seen)):
                    branch = sampler.fork()
                    branch.advance(token)
                    grown.append((tree.add(token, node), [*path, token], branch))
            level = grown
        return tree
        yield

    def _siblings(self, q: np.ndarray, position: int) -> list[int]:
        noise = self.sequence.noise.with_purpose("draft")
        support, width = np.flatnonzero(q), self.drafter.width
        if self.drafter.kind == "point":
            return [int(t) for t in support[np.argsort(-q[support], kind="stable")][:width]]
        weights = np.log(q[support])
        if self.drafter.kind == "wor":
            keys = weights + noise.gumbel(support, position)
            return [int(token) for token in support[np.argsort(-keys)][:width]]
        keys = [weights + noise.gumbel(support, position, attempt) for attempt in range(width)]
        return [int(support[key.argmax()]) for key in keys]

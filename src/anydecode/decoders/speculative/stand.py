"""Stochastic drafts from n-grams with stored probabilities (Song et al., "Accelerated Test-Time
Scaling with Model-Free Speculative Sampling", STAND, arXiv:2506.04708)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.decoders.speculative.static_trees import Shape, worthwhile
from anydecode.decoders.speculative.token_recycling import PUBLISHED, RATES
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

Key = tuple[int, ...]


class NgramProbabilities:
    """For each n-gram's first n - 1 tokens the running average of what the target thought comes
    next, over the `width` likeliest tokens."""

    def __init__(self, longest: int = 4, width: int = 10) -> None:
        self.longest = longest
        self.width = width
        self.rows: dict[Key, tuple[int, dict[int, float]]] = {}

    def update(self, key: Key, tokens: list[int], probabilities: list[float]) -> None:
        """P becomes (k P + P_new) / (k + 1) after k updates; the `width` largest are kept."""
        seen, average = self.rows.get(key, (0, {}))
        merged = {token: share * seen / (seen + 1) for token, share in average.items()}
        for token, share in zip(tokens, probabilities, strict=True):
            merged[token] = merged.get(token, 0.0) + share / (seen + 1)
        best = sorted(merged, key=lambda token: -merged[token])[: self.width]
        self.rows[key] = (seen + 1, {token: merged[token] for token in best})

    def longest_match(self, text: list[int]) -> dict[int, float]:
        """The row of the longest known n-gram that `text` ends with; empty if there is none."""
        for n in range(self.longest, 1, -1):
            row = self.rows.get(tuple(text[len(text) - n + 1 :])) if len(text) >= n - 1 else None
            if row is not None:
                return row[1]
        return {}


class StandDrafter(Drafter):
    """One table for all requests, so that samples of one problem share what they learn."""

    def __init__(self, shape: Shape, longest: int = 4, with_probabilities: bool = False) -> None:
        self.shape = shape
        self.with_probabilities = with_probabilities
        self.table = NgramProbabilities(longest)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.table.rows.clear()


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, drafter: StandDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter

    def tree(self, size: int) -> TokenTree:
        tails: dict[int, list[int]] = {ROOT: self.text[-self.drafter.table.longest :]}
        position = len(self.text)
        rows: dict[int, dict[int, float]] = {}

        def guesses(tree: TokenTree, node: int) -> list[int]:
            if node != ROOT:
                tails[node] = [*tails[tree.parents[node]], tree.tokens[node]]
            rows[node] = row = self.drafter.table.longest_match(tails[node])
            depth = len(tails[node]) - len(tails[ROOT])
            return self._drawn(row, position + depth)

        tree = self.drafter.shape.fill(guesses, size, kind="wor")
        if self.drafter.with_probabilities:
            tree.probabilities = {node: self._dense(rows[node]) for node in rows if rows[node]}
        return tree

    def observe(self, round: SpeculationRound) -> None:
        """Every verified node teaches all its n-grams."""
        table = self.drafter.table
        best, found = round.scores.top(table.width)
        logits = found.astype(np.float64)
        weights = np.exp((logits - logits[:, :1]) / (self.sequence.sampler.temperature or 1.0))
        shares = (weights / weights.sum(axis=1, keepdims=True)).tolist()
        before = round.sequence.all_tokens[: int(round.scores.positions[0]) + 1]
        tails: list[list[int]] = []
        for row, tokens in enumerate(best.tolist()):
            parent = round.tree.parents[row - 1] if row else ROOT
            above = tails[parent + 1] if row else before[-table.longest : -1]
            tails.append([*above, round.scores.tokens[row]])
            for n in range(2, min(table.longest, len(tails[row]) + 1) + 1):
                table.update(tuple(tails[row][len(tails[row]) - n + 1 :]), tokens, shares[row])

    def _drawn(self, row: dict[int, float], position: int) -> list[int]:
        """The row's tokens in the order of draws without replacement: by falling log-probability
        plus the noise of the place; at temperature 0 by falling probability."""
        if len(row) < 2 or self.sequence.sampler.is_greedy:
            return list(row)
        tokens = np.fromiter(row, np.int64, len(row))
        scores = np.log(np.fromiter(row.values(), float, len(row)))
        keys = scores + self.sequence.noise.gumbel(tokens, position)
        drawn: list[int] = tokens[np.argsort(-keys, kind="stable")].tolist()
        return drawn

    def _dense(self, row: dict[int, float]) -> np.ndarray:
        dense = np.zeros(self.sequence.context().pool.model.spec.vocab_size)
        dense[list(row)] = list(row.values())
        dense /= dense.sum()
        return dense


@register(
    Card(
        "stand",
        "speculative",
        paper="STAND (arXiv:2506.04708)",
        exactness="token-exact",
        summary="n-gram tables of the target's probabilities; drafts drawn without replacement.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly: the draws use the noise the target will use",
            "stored probabilities are normalised over the ten likeliest tokens",
            "the tree is token recycling's, cut to what pays at `row_cost`; the paper fits one to"
            " 30 problems",
            "one table for all requests; probabilities are those at the temperature of the request"
            " that taught them",
        ),
    )
)
def stand(row_cost: float = 0.1, longest: int = 4, with_probabilities: bool = False) -> Speculative:
    """STAND with n-grams of up to `longest` tokens."""
    if longest < 2:
        raise InvalidRequestError("stand needs n-grams of at least 2 tokens")
    shape = worthwhile(PUBLISHED, RATES, row_cost)
    return Speculative(StandDrafter(shape, longest, with_probabilities), len(shape))

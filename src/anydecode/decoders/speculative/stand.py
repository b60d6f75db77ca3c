"""STAND: stochastic drafts from n-grams with stored probabilities (Song et al., "Accelerated
Test-Time Scaling with Model-Free Speculative Sampling", STAND, arXiv:2506.04708).

A table keeps the average of the target's distributions after each n-gram. Drafts are drawn from the
table without replacement and fill a fixed tree.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.bounded_table import DEFAULT_MEMORY, BoundedTable
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, TREE_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.decoders.speculative.static_trees import WorthwhileTree
from anydecode.decoders.speculative.token_recycling import chosen_tree
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

Key = tuple[int, ...]
#: Memory of one row of the table, in bytes.
_BYTES_PER_ROW = 1200


class NgramProbabilities:
    """For the first n - 1 tokens of each n-gram, the running average of the target's next-token
    distribution, over the `width` most probable tokens; of up to `memory` bytes."""

    def __init__(self, max_ngram: int = 4, width: int = 10, memory: int = DEFAULT_MEMORY) -> None:
        self.max_ngram = max_ngram
        self.width = width
        self.rows: BoundedTable[Key, tuple[int, dict[int, float]]] = BoundedTable(
            memory, _BYTES_PER_ROW
        )

    def update(self, key: Key, tokens: list[int], probabilities: list[float]) -> None:
        """Add an observation: P becomes (k P + P_new) / (k + 1) after k updates; the `width`
        largest are kept."""
        num_updates, average = self.rows.get(key, (0, {}))
        merged = {
            token: probability * num_updates / (num_updates + 1)
            for token, probability in average.items()
        }
        for token, probability in zip(tokens, probabilities, strict=True):
            merged[token] = merged.get(token, 0.0) + probability / (num_updates + 1)
        best = sorted(merged, key=lambda token: -merged[token])[: self.width]
        self.rows[key] = (num_updates + 1, {token: merged[token] for token in best})

    def longest_match(self, text: list[int]) -> dict[int, float]:
        """The row of the longest stored n-gram that `text` ends with; empty if there is none."""
        for n in range(self.max_ngram, 1, -1):
            row = self.rows.get(tuple(text[len(text) - n + 1 :])) if len(text) >= n - 1 else None
            if row is not None:
                return row[1]
        return {}


class StandDrafter(Drafter):
    """Drafts from one table for all requests, so that samples of one problem share it."""

    def __init__(
        self,
        tree: WorthwhileTree,
        longest: int = 4,
        rule: Acceptance | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        self.tree = tree
        self.reads_probabilities = rule is not None and rule.reads_probabilities
        self.table = NgramProbabilities(longest, memory=memory)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.table.rows.clear()
        self.tree.clear()

    @property
    def num_bytes(self) -> int:
        return self.table.rows.num_bytes


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, drafter: StandDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter

    def tree(self, size: int) -> TokenTree:
        tails: dict[int, list[int]] = {ROOT: self.text[-self.drafter.table.max_ngram :]}
        position = len(self.text)
        rows: dict[int, dict[int, float]] = {}

        def candidates(tree: TokenTree, node: int) -> list[int]:
            if node != ROOT:
                tails[node] = [*tails[tree.parents[node]], tree.tokens[node]]
            rows[node] = row = self.drafter.table.longest_match(tails[node])
            depth = len(tails[node]) - len(tails[ROOT])
            return self._draw(row, position + depth, node)

        shape = self.drafter.tree.shape(self.sequence)
        tree = shape.fill(candidates, size, kind="wor")
        tops = [max(row.values()) for node, row in rows.items() if tree.children(node)]
        tree.confidence = sum(tops) / len(tops) if tops else None
        if self.drafter.reads_probabilities:
            tree.probabilities = {node: self._dense(rows[node]) for node in rows if rows[node]}
        return tree

    def observe(self, round: SpeculationRound) -> None:
        """Count the ranks of the generated tokens, then update the table with all n-grams of every
        verified node."""
        table = self.drafter.table
        best, top_logits = round.scores.top(table.width)
        logits = top_logits.astype(np.float64)
        weights = np.exp((logits - logits[:, :1]) / (self.sequence.sampler.temperature or 1.0))
        probabilities = (weights / weights.sum(axis=1, keepdims=True)).tolist()
        before = round.sequence.all_tokens[: int(round.scores.positions[0]) + 1]
        self._count_ranks(before, round.result.tokens)
        tails: list[list[int]] = []
        for row, tokens in enumerate(best.tolist()):
            parent = round.tree.parents[row - 1] if row else ROOT
            above = tails[parent + 1] if row else before[-table.max_ngram : -1]
            tails.append([*above, round.scores.tokens[row]])
            for n in range(2, min(table.max_ngram, len(tails[row]) + 1) + 1):
                table.update(
                    tuple(tails[row][len(tails[row]) - n + 1 :]), tokens, probabilities[row]
                )

    def _count_ranks(self, text: list[int], tokens: list[int]) -> None:
        tail = text[-self.drafter.table.max_ngram :]
        for position, token in enumerate(tokens, len(text)):
            row = self.drafter.table.longest_match(tail)
            if row:
                self.drafter.tree.record(self._draw(row, position, ROOT), token)
            tail = [*tail, token]

    def _draw(self, row: dict[int, float], position: int, node: int) -> list[int]:
        """The tokens of the row in the order of draws without replacement: by falling
        log-probability plus the noise at the position, for a rejection rule that of the node; at
        temperature 0 by falling probability."""
        attempt = 0
        if len(row) < 2 or self.sequence.sampler.is_greedy:
            return list(row)
        tokens = np.fromiter(row, np.int64, len(row))
        scores = np.log(np.fromiter(row.values(), float, len(row)))
        noise = self.sequence.noise
        if self.drafter.reads_probabilities:
            noise, attempt = noise.with_purpose("draft"), node + 1
        keys = scores + noise.gumbel(tokens, position, attempt)
        ordered: list[int] = tokens[np.argsort(-keys, kind="stable")].tolist()
        return ordered

    def _dense(self, row: dict[int, float]) -> np.ndarray:
        dense = np.zeros(self.sequence.model().spec.vocab_size)
        dense[list(row)] = list(row.values())
        dense /= dense.sum()
        return dense


@register(
    Card(
        "stand",
        "speculative",
        paper="STAND (arXiv:2506.04708)",
        exactness="token-exact",
        summary="Drafts are drawn without replacement from n-gram tables of target probabilities.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly, with draws from the noise that the target will use; the"
            " paper's rule is acceptance='rejection'",
            TREE_NOISE,
            "stored probabilities are normalised over the ten most probable tokens",
            "the tree is the part of token recycling's that saves time, by the measured costs of"
            " passes and by the acceptance rate of each rank, which is counted: at the prior rates"
            " 1 node where a row costs a tenth of a pass, 15 where up to 16 rows cost one pass;"
            " the paper fits a tree of 80 nodes to 30 problems",
            "one table for all requests; probabilities are those at the temperature of the request"
            " that updated them",
            "the entries of the table that were stored longest ago are dropped where it would"
            " exceed `memory` bytes",
            LEARNS_ALONE,
        ),
        bounds={"memory": Range(0, 1 << 40)},
        remote={
            "row_cost": Range(0, 100),
            "max_ngram": Range(2, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def stand(
    row_cost: float | None = None,
    max_ngram: int = 4,
    acceptance: str | Acceptance = "token-exact",
    memory: int = DEFAULT_MEMORY,
) -> Speculative:
    """STAND.

    Args:
        row_cost: Cost of one more row, relative to a pass over one row; None: measured costs.
        max_ngram: Maximum n-gram length.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
        memory: Maximum memory of the table, in bytes.
    """
    if max_ngram < 2:
        raise InvalidRequestError("stand needs n-grams of at least 2 tokens")
    rule = acceptance_rule(acceptance)
    tree = chosen_tree("worthwhile", row_cost, rule)
    drafter = StandDrafter(tree, max_ngram, rule, memory)
    return Speculative(drafter, len(tree.paths), rule)

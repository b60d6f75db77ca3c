"""Drafts searched in a tri-gram table that follows the target (Liu et al., "Adaptive
Draft-Verification for Efficient Large Language Model Decoding", arXiv:2407.12021)."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: The constants of the search's exploration term (Schrittwieser et al., MuZero, arXiv:1911.08265).
C1, C2 = 1.25, 19652.0

Row = dict[int, float]
RowOf = Callable[[TokenTree, int], Row]


class TrigramTable:
    """P(w3 | w1, w2): counted in the prompt at first, the target's own once it scored a pair."""

    def __init__(self, width: int = 8) -> None:
        self.width = width
        self.known: dict[tuple[int, int], Row] = {}

    def row(self, pair: tuple[int, int], counts: dict[tuple[int, int], Row]) -> Row:
        """The likeliest followers of `pair` by falling probability; empty if it never stood."""
        row = self.known.get(pair)
        if row is not None:
            return row
        counted = counts.get(pair, {})
        best = sorted(counted, key=lambda token: -counted[token])[: self.width]
        total = sum(counted.values())
        return {token: counted[token] / total for token in best}


class Search:
    """Monte-Carlo tree search: every simulation follows the branch with the best Q + exploration
    and ends in a node that is new, or at the depth limit. Its value is its path's probability."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tree = TokenTree()
        self.visits: list[int] = []
        self.totals: list[float] = []

    def run(self, first: Row, row: RowOf, size: int) -> TokenTree:
        """The tree of up to `size` nodes after at most twice as many simulations."""
        rows = {ROOT: first}
        for _ in range(2 * size):
            node, value = ROOT, 1.0
            path: list[int] = []
            while len(path) < self.depth:
                if node not in rows:
                    rows[node] = row(self.tree, node)
                token = self._best(node, rows[node])
                if token is None:
                    break
                value *= rows[node][token]
                child = self.tree.child(node, token)
                node = self._add(token, node) if child is None else child
                path.append(node)
                if child is None:
                    break
            for visited in path:
                self.visits[visited] += 1
                self.totals[visited] += value
            if len(self.tree) >= size or not path:
                break
        return self.tree

    def _best(self, node: int, row: Row) -> int | None:
        children = self.tree.children(node)
        total = sum(self.visits[child] for child in children)
        scale = sqrt(max(total, 1)) * (C1 + log((total + C2 + 1) / C2))
        best, best_score = None, -1.0
        for token, share in row.items():
            child = self.tree.child(node, token)
            visits = 0 if child is None else self.visits[child]
            worth = 0.0 if child is None else self.totals[child] / visits
            score = worth + share * scale / (1 + visits)
            if score > best_score:
                best, best_score = token, score
        return best

    def _add(self, token: int, parent: int) -> int:
        self.visits.append(0)
        self.totals.append(0.0)
        return self.tree.add(token, parent)


class AdedDrafter(Drafter):
    """One table for all requests; what the prompts count is each request's own."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        if depth < 1 or width < 1:
            raise InvalidRequestError("aded needs depth and width of at least 1")
        self.depth = depth
        self.table = TrigramTable(width)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.table.known.clear()


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, drafter: AdedDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        self.counts: dict[tuple[int, int], Row] = {}

    def read(self, tokens: list[int]) -> None:
        first = max(2, len(self.text) - len(tokens))
        for position in range(first, len(self.text)):
            row = self.counts.setdefault((self.text[position - 2], self.text[position - 1]), {})
            row[self.text[position]] = row.get(self.text[position], 0.0) + 1.0

    def tree(self, size: int) -> TokenTree:
        if len(self.text) < 2:
            return TokenTree()
        table, counts = self.drafter.table, self.counts
        before, last = self.text[-2:]

        def row(tree: TokenTree, node: int) -> Row:
            parent = tree.parents[node]
            above = last if parent == ROOT else tree.tokens[parent]
            return table.row((above, tree.tokens[node]), counts)

        search = Search(self.drafter.depth)
        return search.run(table.row((before, last), counts), row, size)

    def observe(self, round: SpeculationRound) -> None:
        """Rows of the pairs that were scored become the target's own, rejected nodes' too."""
        scores, position = round.scores, int(round.scores.positions[0])
        if position < 1:
            return
        best, found = scores.top(self.drafter.table.width)
        logits = found.astype(np.float64)
        weights = np.exp(logits - logits[:, :1])
        shares = (weights / weights.sum(axis=1, keepdims=True)).tolist()
        before = round.sequence.all_tokens[position - 1]
        for row, tokens in enumerate(best.tolist()):
            above = before if row == 0 else scores.tokens[round.tree.parents[row - 1] + 1]
            pair = (above, scores.tokens[row])
            self.drafter.table.known[pair] = dict(zip(tokens, shares[row], strict=True))


@register(
    Card(
        "aded",
        "speculative",
        paper="Adaptive Draft-Verification (arXiv:2407.12021)",
        exactness="token-exact",
        summary="Monte-Carlo search in a tri-gram table that follows the target's probabilities.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the table is seeded from the prompt, not from a corpus",
            "a row keeps its `width` likeliest followers, normalised over them",
            "a scored pair's row becomes the target's own at once",
            "sizes (6 nodes, 4 deep, 8 followers) are ours",
            "the search's constants are MuZero's; the paper's are not known to us",
        ),
    )
)
def aded(size: int = 6, depth: int = 4, width: int = 8) -> Speculative:
    """ADED with trees of up to `size` nodes, `depth` deep."""
    return Speculative(AdedDrafter(depth, width), size)

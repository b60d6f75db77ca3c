"""ADED: drafts searched in a tri-gram table (Liu et al., "Adaptive Draft-Verification for Efficient
Large Language Model Decoding", arXiv:2407.12021).

A Monte-Carlo tree search over tri-gram probabilities builds the draft tree. The probabilities are
counted in the prompt at first. After each verification, the target's own probabilities replace
them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.bounded_table import DEFAULT_MEMORY, BoundedTable
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Constants of the search's exploration term (Schrittwieser et al., MuZero, arXiv:1911.08265).
C1, C2 = 1.25, 19652.0

Row = dict[int, float]
#: Memory of one row of the table, in bytes.
_BYTES_PER_ROW = 1000
RowOf = Callable[[TokenTree, int], Row]


class TrigramTable:
    """P(w3 | w1, w2): counted in the prompt at first, the target's own probabilities once it has
    scored the pair (w1, w2), of up to `memory` bytes."""

    def __init__(self, width: int = 8, memory: int = DEFAULT_MEMORY) -> None:
        self.width = width
        self.rows: BoundedTable[tuple[int, int], Row] = BoundedTable(memory, _BYTES_PER_ROW)

    def row(self, pair: tuple[int, int], counts: dict[tuple[int, int], Row]) -> Row:
        """The most probable successors of `pair`, by falling probability; empty if the pair has not
        occurred."""
        row = self.rows.get(pair)
        if row is not None:
            return row
        counted = counts.get(pair, {})
        best = sorted(counted, key=lambda token: -counted[token])[: self.width]
        total = sum(counted.values())
        return {token: counted[token] / total for token in best}


class Search:
    """Monte-Carlo tree search. Each simulation follows the branch with the best Q + exploration
    term. It ends at a new node or at the depth limit. Its value is the probability of its path."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tree = TokenTree()
        self.visits: list[int] = []
        self.totals: list[float] = []

    def run(self, first: Row, row: RowOf, size: int) -> TokenTree:
        """Return a tree of up to `size` nodes, after at most 2 * `size` simulations."""
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
        for token, probability in row.items():
            child = self.tree.child(node, token)
            visits = 0 if child is None else self.visits[child]
            value = 0.0 if child is None else self.totals[child] / visits
            score = value + probability * scale / (1 + visits)
            if score > best_score:
                best, best_score = token, score
        return best

    def _add(self, token: int, parent: int) -> int:
        self.visits.append(0)
        self.totals.append(0.0)
        return self.tree.add(token, parent)


class AdedDrafter(Drafter):
    """Drafts by tree search. The table is shared by all requests; the counts of a prompt belong to
    its request."""

    def __init__(self, depth: int = 4, width: int = 8, memory: int = DEFAULT_MEMORY) -> None:
        if depth < 1 or width < 1:
            raise InvalidRequestError("aded needs depth >= 1 and width >= 1")
        self.depth = depth
        self.table = TrigramTable(width, memory)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.table.rows.clear()

    @property
    def num_bytes(self) -> int:
        return self.table.rows.num_bytes


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
            previous = last if parent == ROOT else tree.tokens[parent]
            return table.row((previous, tree.tokens[node]), counts)

        search = Search(self.drafter.depth)
        return search.run(table.row((before, last), counts), row, size)

    def observe(self, round: SpeculationRound) -> None:
        """Replace the rows of all scored pairs, accepted or not, by the target's probabilities."""
        scores, position = round.scores, int(round.scores.positions[0])
        if position < 1:
            return
        best, top_logits = scores.top(self.drafter.table.width)
        logits = top_logits.astype(np.float64)
        weights = np.exp(logits - logits[:, :1])
        probabilities = (weights / weights.sum(axis=1, keepdims=True)).tolist()
        previous_token = round.sequence.all_tokens[position - 1]
        for row, tokens in enumerate(best.tolist()):
            previous = (
                previous_token if row == 0 else scores.tokens[round.tree.parents[row - 1] + 1]
            )
            pair = (previous, scores.tokens[row])
            self.drafter.table.rows[pair] = dict(zip(tokens, probabilities[row], strict=True))


@register(
    Card(
        "aded",
        "speculative",
        paper="Adaptive Draft-Verification (arXiv:2407.12021)",
        exactness="token-exact",
        summary="Drafts come from a tree search in a tri-gram table of the target's probabilities.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the table starts with counts of the prompt, not of a corpus",
            "a row keeps the `width` most probable successors, normalised over them",
            "the row of a scored pair is replaced by the target's probabilities at once",
            "the default sizes (6 nodes, depth 4, 8 successors) are not the paper's",
            "the constants of the search are MuZero's, since the paper does not state its own",
            "the entries of the table that were stored longest ago are dropped where it would"
            " exceed `memory` bytes",
            LEARNS_ALONE,
        ),
        bounds={"memory": Range(0, 1 << 40)},
        remote={
            "size": Range(1, 64),
            "depth": Range(1, 32),
            "width": Range(1, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def aded(
    size: int = 6,
    depth: int = 4,
    width: int = 8,
    acceptance: str | Acceptance = "token-exact",
    memory: int = DEFAULT_MEMORY,
) -> Speculative:
    """ADED: tree search in a tri-gram table.

    Args:
        size: Maximum number of nodes of a draft tree.
        depth: Maximum depth of a draft tree.
        width: Successors stored per token pair.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
        memory: Maximum memory of the table, in bytes.
    """
    return Speculative(AdedDrafter(depth, width, memory), size, acceptance_rule(acceptance))

"""A tree of draft tokens: proposed by a drafter, walked by an acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.kernels.routes import TreeRoute

#: Parent index of the first level: the last token that is already part of the text.
ROOT = -1


@dataclass(eq=False)
class TokenTree:
    """Draft tokens with parent indices. Siblings are in the order in which they were drafted.

    Args:
        tokens: One token id per node.
        parents: `parents[i]` is the node that node i follows, or `ROOT` for the first level. A
            parent comes before its children.
        probabilities: `probabilities[node]` is the draft distribution, float64 `[vocab_size]`,
            from which the children of `node` were sampled. Empty if the drafter has none.
        kind: How children were sampled: "point" (chosen, not sampled), "wor" (without
            replacement) or "iid".
        sources: The name of the drafter of each node, for traces.
        confidence: The mean, over the nodes that have children, of the probability of the most
            probable child by the drafter; None if the drafter has no probabilities.
        embeddings: `embeddings[node]` is the input, float32 `[hidden_size]`, of a node that has no
            token (-1). Such nodes come last, are children of none, and are never accepted.
        adapters: `adapters[node]` is the index of the LoRA adapter of a node; the others have that
            of the sequence.
        route: How the pass runs that verifies the tree; None: the layers as they are.
        draft_states: The draft model's last hidden states at the nodes, after its final norm,
            float32 `[nodes, hidden_size]`, for acceptance rules that read them.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: dict[int, Any] = field(default_factory=dict)
    kind: str = "point"
    sources: list[str] | None = None
    confidence: float | None = None
    embeddings: dict[int, Any] = field(default_factory=dict)
    adapters: dict[int, int] = field(default_factory=dict)
    route: TreeRoute | None = None
    draft_states: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._children: dict[int, dict[int, int]] = {}
        self._order: dict[int, list[int]] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            self._link(node, parent, token)

    @staticmethod
    def chain(tokens: Seq[int], **fields: Any) -> TokenTree:
        """A tree with a single path."""
        return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)), **fields)

    @staticmethod
    def merge(paths: Seq[Seq[int]]) -> TokenTree:
        """The prefix tree (trie) of `paths`."""
        tree = TokenTree()
        for path in paths:
            node = ROOT
            for token in path:
                child = tree.child(node, token)
                node = tree.add(token, node) if child is None else child
        return tree

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a single path."""
        return self.parents == list(range(ROOT, len(self.parents) - 1))

    def first(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes."""
        return TokenTree(
            self.tokens[:count],
            self.parents[:count],
            {node: row for node, row in self.probabilities.items() if node < count},
            self.kind,
            None if self.sources is None else self.sources[:count],
            embeddings={node: row for node, row in self.embeddings.items() if node < count},
            adapters={node: one for node, one in self.adapters.items() if node < count},
            route=self.route,
            draft_states=None if self.draft_states is None else self.draft_states[:count],
        )

    def reordered(self, order: Seq[int]) -> TokenTree:
        """The same tree of tokens with its nodes in another order, in which no parent comes after
        its children."""
        new = {ROOT: ROOT} | {node: index for index, node in enumerate(order)}
        return TokenTree(
            [self.tokens[node] for node in order],
            [new[self.parents[node]] for node in order],
            {new[node]: row for node, row in self.probabilities.items()},
            self.kind,
            None if self.sources is None else [self.sources[node] for node in order],
            self.confidence,
            adapters={new[node]: one for node, one in self.adapters.items()},
            draft_states=None if self.draft_states is None else self.draft_states[list(order)],
        )

    def add(self, token: int, parent: int = ROOT) -> int:
        """Append a node and return its index."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._link(node, parent, token)
        return node

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` with this token, or None."""
        return self._children.get(node, {}).get(token)

    def children(self, node: int) -> list[int]:
        """Children of `node` in draft order."""
        return self._order.get(node, [])

    def path(self, node: int) -> list[int]:
        """The nodes from the first level down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depth(self, node: int) -> int:
        """Depth of `node`; 1 for the first level."""
        return len(self.path(node))

    def depths(self) -> list[int]:
        """Depth of each node, as `depth` has it."""
        found = list[int]()
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    def __len__(self) -> int:
        return len(self.tokens)

    def _link(self, node: int, parent: int, token: int) -> None:
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; allowed are -1 to {node - 1}")
        if token < 0:
            return
        self._children.setdefault(parent, {}).setdefault(token, node)
        self._order.setdefault(parent, []).append(node)

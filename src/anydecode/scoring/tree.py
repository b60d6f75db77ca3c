"""Draft tokens as a tree: what a drafter proposes and an acceptance rule walks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

#: The node every tree hangs on: the last token that is already decided.
ROOT = -1


@dataclass(eq=False)
class TokenTree:
    """`tokens[i]` follows `parents[i]` (`ROOT` for the first level; a parent comes before its
    children). Siblings stand in the order they were drafted.

    `probabilities[node]` is the draft distribution the children of `node` were drawn from (float64
    `[vocab_size]`), where the drafter has one; `kind` says how: "point" (chosen, not drawn), "wor"
    (drawn without replacement) or "iid".
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: dict[int, Any] = field(default_factory=dict)
    kind: str = "point"
    sources: list[str] | None = None  # who drafted each node, for traces

    def __post_init__(self) -> None:
        self._children: dict[int, dict[int, int]] = {}
        self._order: dict[int, list[int]] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            self._link(node, parent, token)

    @staticmethod
    def chain(tokens: Seq[int], **fields: Any) -> TokenTree:
        """One path."""
        return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)), **fields)

    @staticmethod
    def merge(paths: Seq[Seq[int]]) -> TokenTree:
        """The tree that shares the common prefixes of `paths`."""
        tree = TokenTree()
        for path in paths:
            node = ROOT
            for token in path:
                child = tree.child(node, token)
                node = tree.add(token, node) if child is None else child
        return tree

    @property
    def is_chain(self) -> bool:
        """Whether there is but one path."""
        return self.parents == list(range(ROOT, len(self.parents) - 1))

    def add(self, token: int, parent: int = ROOT) -> int:
        """Append a node; returns its index."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._link(node, parent, token)
        return node

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that holds `token`."""
        return self._children.get(node, {}).get(token)

    def children(self, node: int) -> list[int]:
        """Children of `node` in draft order."""
        return self._order.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from the first level down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depth(self, node: int) -> int:
        """1 for the first level."""
        return len(self.path(node))

    def __len__(self) -> int:
        return len(self.tokens)

    def _link(self, node: int, parent: int, token: int) -> None:
        if not -1 <= parent < node:
            raise ValueError(f"node {node} cannot hang on {parent}")
        self._children.setdefault(parent, {}).setdefault(token, node)
        self._order.setdefault(parent, []).append(node)

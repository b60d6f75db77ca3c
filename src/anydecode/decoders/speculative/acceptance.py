"""Rules that walk a scored draft tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree


@dataclass(eq=False)
class Verdict:
    """The nodes kept, from the first level down, and the tokens to say: theirs and one more."""

    path: list[int]
    tokens: list[int]


class Acceptance(ABC):
    """Row 0 of the scores answers for the tree's root, row i + 1 for node i."""

    exactness: str

    @abstractmethod
    def walk(self, tree: TokenTree, scores: Scores) -> Verdict: ...


class TokenExact(Acceptance):
    """Follow what plain decoding would pick, with the same noise, as far as the tree goes."""

    exactness = "token-exact"

    def walk(self, tree: TokenTree, scores: Scores) -> Verdict:
        node, path, tokens = ROOT, [], []
        while True:
            token = scores.pick(node + 1)
            tokens.append(token)
            child = tree.child(node, token)
            if child is None:
                return Verdict(path, tokens)
            path.append(child)
            node = child

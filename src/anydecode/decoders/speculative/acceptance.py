"""Rules that walk a scored draft tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree


@dataclass(eq=False)
class AcceptanceResult:
    """The nodes kept, from the first level down, and the tokens to say: theirs and one more."""

    path: list[int]
    tokens: list[int]


class Acceptance(ABC):
    """Row 0 of the scores answers for the tree's root, row i + 1 for node i."""

    exactness: str

    @abstractmethod
    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult: ...


class TokenExact(Acceptance):
    """Follow what plain decoding would pick, with the same noise, as far as the tree goes."""

    exactness = "token-exact"

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        node = ROOT
        path: list[int] = []
        tokens: list[int] = []
        while True:
            token = scores.sample(node + 1)
            tokens.append(token)
            child = tree.child(node, token)
            if child is None:
                return AcceptanceResult(path, tokens)
            path.append(child)
            node = child


class ThresholdAcceptance(Acceptance):
    """A lossy rule that judges each draft by the target's probability of it. The longest path of
    drafts that pass is kept, the likeliest among equals, and one picked token follows it."""

    exactness = "lossy"

    @abstractmethod
    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        """Whether each of `tokens` is good enough under `p`, float64 `[vocab_size]`. `depth` is 1
        for the first drafts."""

    def judged(self, scores: Scores, row: int) -> np.ndarray:
        """The distribution that drafts behind `row` are judged by, float64 `[vocab_size]`."""
        return scores.distribution(row).dense(scores.logits.shape[1])

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        open_paths: list[tuple[int, float, list[int]]] = [(ROOT, 0.0, [])]
        while open_paths:
            node, weight, path = open_paths.pop()
            if path and (len(path), weight) > best[:2] or len(path) > best[0]:
                best = (len(path), weight, path)
            children = tree.children(node)
            if not children:
                continue
            p = self.judged(scores, node + 1)
            drafted = [tree.tokens[child] for child in children]
            passed = self.passes(p, drafted, len(path) + 1)
            for child, token, good in zip(children, drafted, passed, strict=True):
                if good and tree.child(node, token) == child:
                    gain = float(np.log(max(p[token], 1e-300)))
                    open_paths.append((child, weight + gain, [*path, child]))
        return self._verdict(tree, scores, best[2])

    @staticmethod
    def _verdict(tree: TokenTree, scores: Scores, path: list[int]) -> AcceptanceResult:
        tokens, row = [], 0
        for node in path:
            token, position = tree.tokens[node], int(scores.positions[row]) + 1
            scores.sequence.record_logprobs(
                scores.row(row), position, token, scores.sampler_after(row)
            )
            tokens.append(token)
            row = node + 1
        return AcceptanceResult(path, [*tokens, scores.sample(row)])


class TypicalAcceptance(ThresholdAcceptance):
    """Keep a draft more likely than min(`epsilon`, `delta` exp(-H)), H the entropy of the target's
    distribution in nats (Cai et al., Medusa, arXiv:2401.10774)."""

    def __init__(self, epsilon: float = 0.3, delta: float = 0.09) -> None:
        if not (0 < epsilon < 1 and delta > 0):
            raise InvalidRequestError("typical acceptance needs 0 < epsilon < 1 and delta > 0")
        self.epsilon = epsilon
        self.delta = delta

    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        held = p[p > 0]
        entropy = -float((held * np.log(held)).sum())
        bound = min(self.epsilon, self.delta * float(np.exp(-entropy)))
        return [bool(p[token] > bound) for token in tokens]


class TopMAcceptance(ThresholdAcceptance):
    """Keep a draft among the target's `count` likeliest tokens (ties to the lower id), the first
    `block` - 1 drafts whatever they are, if they are allowed (Stern et al., arXiv:1811.03115). With
    `gap`, it must also be within that many nats of the likeliest (Xia et al., arXiv:2203.16487).
    Temperature and truncations play no part."""

    def __init__(self, count: int = 2, gap: float | None = None, block: int = 1) -> None:
        if count < 1 or block < 1 or (gap is not None and gap < 0):
            raise InvalidRequestError("top-m acceptance needs count >= 1, block >= 1 and gap >= 0")
        self.count = count
        self.gap = gap
        self.block = block

    def judged(self, scores: Scores, row: int) -> np.ndarray:
        state = scores.sampler_after(row)
        raw = Sampler(1.0, state.pre_temperature, combiner=state.combiner)
        return raw.distribution(scores.row(row)).dense(scores.logits.shape[1])

    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        if depth < self.block:
            return [bool(p[token] > 0) for token in tokens]
        top = float(p.max())
        floor = 0.0 if self.gap is None else top * float(np.exp(-self.gap))
        return [bool(p[t] > 0 and p[t] >= floor and _rank(p, t) < self.count) for t in tokens]


def _rank(p: np.ndarray, token: int) -> int:
    """How many tokens stand before `token`."""
    return int((p > p[token]).sum() + (p[:token] == p[token]).sum())

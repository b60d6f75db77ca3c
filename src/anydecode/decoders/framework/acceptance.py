"""Acceptance rules: which nodes of a scored draft tree are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


@dataclass(eq=False)
class AcceptanceResult:
    """The accepted nodes, from the first level down, and the tokens to emit: those of the accepted
    nodes and one more (the bonus token)."""

    path: list[int]
    tokens: list[int]


class Acceptance(ABC):
    """Base class of acceptance rules. `exactness` is the guarantee that the rule gives."""

    exactness: str
    #: Whether it compares drafts with the distributions that they were drawn from, which
    #: `TokenTree.probabilities` must hold; at temperature 0, where they are single tokens, they may
    #: be left out.
    reads_probabilities = False
    #: Whether it reads the target's last hidden states, which the scores must have.
    reads_states = False

    def prepare(self, sequence: Sequence) -> None:
        """Raise `UnsupportedCombinationError` for a request that this rule cannot serve."""

    def reads_draft_states(self, sequence: Sequence) -> bool:
        """Whether it reads the draft model's last hidden states, which `TokenTree.draft_states`
        must hold."""
        return False

    @abstractmethod
    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        """Return the accepted path of `tree` and the tokens to emit.

        Args:
            tree: The draft tree.
            scores: The target's scores; `scores.after(node)` is the row of a node.
        """


class StepAcceptance(Acceptance):
    """A rule that goes down the tree: each token is that of an accepted child, or the last one."""

    @abstractmethod
    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        """The accepted one of `children`, or None, and the token emitted after `node`."""

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        node = ROOT
        path: list[int] = []
        tokens: list[int] = []
        while True:
            child, token = self.step(tree, scores, node, tree.children(node))
            tokens.append(token)
            if child is None:
                return AcceptanceResult(path, tokens)
            path.append(child)
            node = child


class TokenExact(StepAcceptance):
    """Sample each token as plain decoding does, with the same noise, and accept a draft if it
    equals that token. The output equals plain decoding, token by token."""

    exactness = "token-exact"

    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        token = scores.sample(scores.after(node))
        return tree.child(node, token), token


def is_token_exact(rule: Acceptance | None) -> bool:
    """Whether no text under a rule depends on what is drafted; None stands for `TokenExact`."""
    return rule is None or isinstance(rule, TokenExact)


class ThresholdAcceptance(Acceptance):
    """A lossy rule that accepts each draft by the target's probability of it. The longest path of
    accepted drafts is kept, the most probable one among equals, and one sampled token follows it.
    """

    exactness = "lossy"

    @abstractmethod
    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        """Return whether each of `tokens` is accepted.

        Args:
            p: The target's distribution, float64 `[vocab_size]`.
            tokens: The drafts of one parent.
            depth: Depth of the drafts in the tree; 1 on the first level.
        """

    def target_distribution(self, scores: Scores, row: int) -> np.ndarray:
        """The distribution that judges the drafts after `row`, float64 `[vocab_size]`."""
        return scores.distribution(row).dense(scores.logits.shape[1])

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        open_paths: list[tuple[int, float, list[int]]] = [(ROOT, 0.0, [])]
        while open_paths:
            node, log_probability, path = open_paths.pop()
            if path and (len(path), log_probability) > best[:2] or len(path) > best[0]:
                best = (len(path), log_probability, path)
            children = tree.children(node)
            if not children:
                continue
            p = self.target_distribution(scores, scores.after(node))
            draft_tokens = [tree.tokens[child] for child in children]
            passed = self.passes(p, draft_tokens, len(path) + 1)
            for child, token, is_accepted in zip(children, draft_tokens, passed, strict=True):
                if is_accepted and tree.child(node, token) == child:
                    gain = float(np.log(max(p[token], 1e-300)))
                    open_paths.append((child, log_probability + gain, [*path, child]))
        return self._accept_path(tree, scores, best[2])

    @staticmethod
    def _accept_path(tree: TokenTree, scores: Scores, path: list[int]) -> AcceptanceResult:
        tokens, row = [], scores.after(ROOT)
        for node in path:
            token, position = tree.tokens[node], int(scores.positions[row]) + 1
            scores.sequence.record_logprobs(
                scores.row(row), position, token, scores.sampler_after(row)
            )
            tokens.append(token)
            row = scores.after(node)
        return AcceptanceResult(path, [*tokens, scores.sample(row)])


class TypicalAcceptance(ThresholdAcceptance):
    """Accept a draft if its probability is above min(`epsilon`, `delta` exp(-H)), where H is the
    entropy of the target's distribution in nats (Cai et al., Medusa, arXiv:2401.10774)."""

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0 < epsilon < 1 and delta > 0):
            raise InvalidRequestError("typical acceptance needs 0 < epsilon < 1 and delta > 0")
        self.epsilon = epsilon
        self.delta = delta

    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        positive = p[p > 0]
        entropy = -float((positive * np.log(positive)).sum())
        bound = min(self.epsilon, self.delta * float(np.exp(-entropy)))
        return [bool(p[token] > bound) for token in tokens]


class TopMAcceptance(ThresholdAcceptance):
    """Accept a draft if it is among the target's `count` most probable tokens; ties go to the lower
    id (Stern et al., arXiv:1811.03115). The first `block` - 1 drafts are accepted whenever their
    probability is above 0. With `gap`, a draft must also be within that many nats of the most
    probable token (Xia et al., arXiv:2203.16487). Temperature and truncation are ignored."""

    def __init__(self, count: int = 2, gap: float | None = None, block: int = 1) -> None:
        if count < 1 or block < 1 or (gap is not None and gap < 0):
            raise InvalidRequestError("top-m acceptance needs count >= 1, block >= 1 and gap >= 0")
        self.count = count
        self.gap = gap
        self.block = block

    def target_distribution(self, scores: Scores, row: int) -> np.ndarray:
        distribution = untruncated_distribution(scores, row)
        return distribution.dense(scores.logits.shape[1])

    def passes(self, p: np.ndarray, tokens: list[int], depth: int) -> list[bool]:
        if depth < self.block:
            return [bool(p[token] > 0) for token in tokens]
        top = float(p.max())
        floor = 0.0 if self.gap is None else top * float(np.exp(-self.gap))
        return [bool(p[t] > 0 and p[t] >= floor and _rank(p, t) < self.count) for t in tokens]


def untruncated_distribution(scores: Scores, row: int) -> Distribution:
    """The target's distribution after `row` at temperature 1 and without truncation. It lacks only
    the tokens that the request forbids."""
    state = scores.sampler_after(row)
    raw = Sampler(1.0, state.pre_temperature, combiner=state.combiner)
    return raw.distribution(scores.row(row))


def _rank(p: np.ndarray, token: int) -> int:
    """The number of tokens that rank before `token`."""
    return int((p > p[token]).sum() + (p[:token] == p[token]).sum())

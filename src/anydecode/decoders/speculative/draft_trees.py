"""Token trees that a draft model scores while they grow: what the tree methods have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.decoders.speculative.core import Drafter, Proposal, Round, Session
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.sampling.candidates import Distribution, largest
from anydecode.sampling.policy import Policy
from anydecode.scoring.score import Request
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: How many of a draft distribution's likeliest tokens are looked at; the rest is cut off.
WIDTH = 64


@dataclass(eq=False)
class Guesses:
    """What a draft model thinks may follow a node: `tokens` in the order in which draws without
    replacement give them, their `probabilities` (float64, summing to one) and `keys`: logarithm of
    the probability plus the noise of the place, falling. Without noise the two orders are one."""

    tokens: np.ndarray
    probabilities: np.ndarray
    keys: np.ndarray

    def dense(self, size: int) -> np.ndarray:
        """float64 `[size]`."""
        row = np.zeros(size)
        row[self.tokens] = self.probabilities
        return row

    @property
    def beliefs(self) -> np.ndarray:
        """How likely each token is the one that the noise picks, if the draft model were right up
        to standard Gumbel error: softmax of the keys."""
        weights: np.ndarray = np.exp(self.keys - self.keys[0])
        weights /= weights.sum()
        return weights


class GrowingTree:
    """A tree in `lane`, scored level by level. With `own_noise` every node has noise of its own, as
    rejection sampling wants; else the target's, which makes token-exact acceptance likelier."""

    def __init__(self, sequence: Sequence, lane: str = DRAFT, own_noise: bool = False) -> None:
        self.sequence = sequence
        self.lane = lane
        self.own_noise = own_noise
        self.tree = TokenTree()
        self.depths: list[int] = []
        self.guesses: dict[int, Guesses] = {}
        self._policies: dict[int, Policy] = {}
        self._places: dict[int, int] = {}

    def start(self, chain: Seq[int] = ()) -> Generator[Request, Any, None]:
        """Score the text and a first path behind it, in one pass, so that their `guesses` are
        known."""
        sequence = self.sequence
        sequence.align(self.lane)
        scores = yield sequence.verify(TokenTree.chain(chain), lane=self.lane, grows=True)
        self._policies[ROOT] = sequence.policy.fork()
        self._take(ROOT, scores.row(0))
        for place, token in enumerate(chain):
            node = self.add(token, place - 1)
            self._places[node] = place
            self._follow(node)
            self._take(node, scores.row(place + 1))

    def add(self, token: int, parent: int) -> int:
        """A node that is not scored yet."""
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return self.tree.add(int(token), parent)

    def expand(self, nodes: Seq[int]) -> Generator[Request, Any, None]:
        """Score `nodes`, whose parents are scored, in one pass; their `guesses` are then known."""
        if not len(nodes):
            return
        tree = self.tree
        parents = [tree.parents[node] for node in nodes]
        above = [ROOT if parent == ROOT else self._places[parent] for parent in parents]
        first = len(self._places)
        self._places.update({node: first + place for place, node in enumerate(nodes)})
        held = [tree.tokens[node] for node in nodes]
        scores = yield self.sequence.extend(held, above, lane=self.lane)
        for row, node in enumerate(nodes):
            self._follow(node)
            self._take(node, scores.row(row))

    def pruned(self, nodes: Seq[int], kind: str, with_probabilities: bool) -> TokenTree:
        """The tree of `nodes` alone (parents among them), in their order."""
        tree, places = TokenTree(kind=kind), {ROOT: ROOT}
        for node in nodes:
            places[node] = tree.add(self.tree.tokens[node], places[self.tree.parents[node]])
        if with_probabilities:
            size = self.sequence.context().pool.model.spec.vocab_size
            tree.probabilities = {
                places[node]: guesses.dense(size)
                for node, guesses in self.guesses.items()
                if node in places and tree.children(places[node])
            }
        return tree

    def keep(self, tokens: Seq[int]) -> None:
        """`tokens` have been accepted behind the text: what is scored of them stays in memory."""
        context = self.sequence.context(self.lane)
        path, node = [], ROOT
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None or child not in self._places:
                break
            path.append(self._places[child])
            node = child
        if context.pending is not None:
            context.retain(path)

    def _follow(self, node: int) -> None:
        policy = self._policies[self.tree.parents[node]]
        if policy.stateful:
            policy = policy.fork()
            policy.advance(self.tree.tokens[node])
        self._policies[node] = policy

    def _take(self, node: int, row: np.ndarray) -> None:
        sequence = self.sequence
        position = sequence.length + (0 if node == ROOT else self.depths[node])
        found = draft_distribution(self._policies[node], fitted(sequence, row))
        tokens, scores = found.tokens, found.scores
        if len(scores) > WIDTH:
            kept = largest(scores, WIDTH)
            tokens, scores = kept if tokens is None else tokens[kept], scores[kept]
        ids = np.arange(len(scores)) if tokens is None else np.asarray(tokens, np.int64)
        exact = scores.astype(np.float64) - float(scores.max())
        logs = exact - np.log(np.exp(exact).sum())
        keys = logs
        if not sequence.policy.is_greedy:
            noise = sequence.noise.with_purpose("draft") if self.own_noise else sequence.noise
            attempt = node + 1 if self.own_noise else 0
            keys = logs + noise.gumbel(ids, position, attempt)
        order = np.argsort(-keys, kind="stable")
        self.guesses[node] = Guesses(ids[order], np.exp(logs[order]), keys[order])


def draft_distribution(policy: Policy, row: np.ndarray) -> Distribution:
    """What a tree drafts from: the policy's distribution; at temperature 0, where that is a single
    token, the distribution at temperature 1."""
    if policy.is_greedy:
        return Policy(1.0, policy.before).distribution(row)
    return policy.distribution(row)


class TreeSession(Session):
    """A tree drafter at work; subclasses grow the tree."""

    def __init__(self, sequence: Sequence, drafter: TreeDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.growing: GrowingTree | None = None

    def propose(self, size: int) -> Proposal:
        if size < 1:
            return TokenTree()
        drafter = self.drafter
        self.growing = GrowingTree(self.sequence, own_noise=drafter.with_probabilities)
        yield from self.growing.start()
        nodes = yield from drafter.grow(self.growing, size)
        return self.growing.pruned(nodes, drafter.kind, drafter.with_probabilities)

    def observe(self, round: Round) -> None:
        if self.growing is not None:
            self.growing.keep([round.tree.tokens[node] for node in round.verdict.path])
            self.growing = None


class TreeDrafter(Drafter):
    """Trees from the lane "draft". `kind` is how siblings are chosen, see `TokenTree`."""

    lanes = (DRAFT,)
    kind = "point"

    def __init__(self, with_probabilities: bool = False) -> None:
        self.with_probabilities = with_probabilities

    @abstractmethod
    def grow(self, growing: GrowingTree, size: int) -> Generator[Request, Any, list[int]]:
        """Grow the tree; returns the up to `size` nodes to verify, siblings in draft order."""

    def open(self, sequence: Sequence) -> Session:
        return TreeSession(sequence, self)

"""Token trees that a draft model scores while they grow: what the tree methods have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, SpeculationRound
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.sampling.candidates import Distribution, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction
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
    """A tree in `runner`, scored level by level. With `own_noise` every node has noise of its
    own, as
    rejection sampling wants; else the target's, which makes token-exact acceptance likelier."""

    def __init__(self, sequence: Sequence, runner: str = DRAFT, own_noise: bool = False) -> None:
        self.sequence = sequence
        self.runner = runner
        self.own_noise = own_noise
        self.tree = TokenTree()
        self.depths: list[int] = []
        self.guesses: dict[int, Guesses] = {}
        self._policies: dict[int, Sampler] = {}
        self._positions: dict[int, int] = {}

    def start(self, chain: Seq[int] = ()) -> Generator[DecoderAction, Any, None]:
        """Score the text and a first path behind it, in one pass, so that their `guesses` are
        known."""
        sequence = self.sequence
        sequence.align(self.runner)
        scores = yield sequence.verify(TokenTree.chain(chain), runner=self.runner, grows=True)
        self._policies[ROOT] = sequence.sampler.fork()
        self._take(ROOT, scores.row(0))
        for position, token in enumerate(chain):
            node = self.add(token, position - 1)
            self._positions[node] = position
            self._follow(node)
            self._take(node, scores.row(position + 1))

    def add(self, token: int, parent: int) -> int:
        """A node that is not scored yet."""
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return self.tree.add(int(token), parent)

    def expand(self, nodes: Seq[int]) -> Generator[DecoderAction, Any, None]:
        """Score `nodes`, whose parents are scored, in one pass; their `guesses` are then known."""
        if not len(nodes):
            return
        tree = self.tree
        parents = [tree.parents[node] for node in nodes]
        above = [ROOT if parent == ROOT else self._positions[parent] for parent in parents]
        first = len(self._positions)
        self._positions.update({node: first + position for position, node in enumerate(nodes)})
        held = [tree.tokens[node] for node in nodes]
        scores = yield self.sequence.extend(held, above, runner=self.runner)
        for row, node in enumerate(nodes):
            self._follow(node)
            self._take(node, scores.row(row))

    def pruned(self, nodes: Seq[int], kind: str, with_probabilities: bool) -> TokenTree:
        """The tree of `nodes` alone (parents among them), in their order."""
        tree, positions = TokenTree(kind=kind), {ROOT: ROOT}
        for node in nodes:
            positions[node] = tree.add(self.tree.tokens[node], positions[self.tree.parents[node]])
        if with_probabilities:
            size = self.sequence.context().pool.model.spec.vocab_size
            tree.probabilities = {
                positions[node]: guesses.dense(size)
                for node, guesses in self.guesses.items()
                if node in positions and tree.children(positions[node])
            }
        return tree

    def keep(self, tokens: Seq[int]) -> None:
        """`tokens` have been accepted behind the text: what is scored of them stays in memory."""
        context = self.sequence.context(self.runner)
        path, node = [], ROOT
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None or child not in self._positions:
                break
            path.append(self._positions[child])
            node = child
        if context.pending is not None:
            context.retain(path)

    def _follow(self, node: int) -> None:
        sampler = self._policies[self.tree.parents[node]]
        if sampler.stateful:
            sampler = sampler.fork()
            sampler.advance(self.tree.tokens[node])
        self._policies[node] = sampler

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
        if not sequence.sampler.is_greedy:
            noise = sequence.noise.with_purpose("draft") if self.own_noise else sequence.noise
            attempt = node + 1 if self.own_noise else 0
            keys = logs + noise.gumbel(ids, position, attempt)
        order = np.argsort(-keys, kind="stable")
        self.guesses[node] = Guesses(ids[order], np.exp(logs[order]), keys[order])


def draft_distribution(sampler: Sampler, row: np.ndarray) -> Distribution:
    """What a tree drafts from: the policy's distribution; at temperature 0, where that is a single
    token, the distribution at temperature 1."""
    if sampler.is_greedy:
        return Sampler(1.0, sampler.pre_temperature).distribution(row)
    return sampler.distribution(row)


class TreeSession(DraftSession):
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

    def observe(self, round: SpeculationRound) -> None:
        if self.growing is not None:
            self.growing.keep([round.tree.tokens[node] for node in round.verdict.path])
            self.growing = None


class TreeDrafter(Drafter):
    """Trees from the lane "draft". `kind` is how siblings are chosen, see `TokenTree`."""

    runners = (DRAFT,)
    kind = "point"

    def __init__(self, with_probabilities: bool = False) -> None:
        self.with_probabilities = with_probabilities

    @abstractmethod
    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        """Grow the tree; returns the up to `size` nodes to verify, siblings in draft order."""

    def open(self, sequence: Sequence) -> DraftSession:
        return TreeSession(sequence, self)

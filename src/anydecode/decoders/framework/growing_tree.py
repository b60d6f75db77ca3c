"""A draft tree that is scored by a draft model while it grows."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np

from anydecode.decoders.framework.draft_candidates import (
    DraftCandidates,
    draft_candidates,
    fit_vocab,
)
from anydecode.kernels.interface import Variant
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT, TokenTree

TreeNoise = Literal["target", "own", "none"]


class GrowingTree:
    """A draft tree in `runner`, scored level by level.

    `noise` is what orders a node's candidates: "target": the target's noise, which makes
    token-exact acceptance more likely; "own": noise of every node's own, as rejection rules require
    of samples; "none": the most probable candidates come first.

    With `variant` the passes behind the first one run the layers in another way, and what they
    store is not kept.
    """

    def __init__(
        self,
        sequence: Sequence,
        runner: str = DRAFT,
        noise: TreeNoise = "target",
        variant: Variant | None = None,
    ) -> None:
        self.sequence = sequence
        self.runner = runner
        self.noise = noise
        self.variant = variant
        self.tree = TokenTree()
        self.depths: list[int] = []
        self.candidates: dict[int, DraftCandidates] = {}
        self._samplers: dict[int, Sampler] = {}
        self._positions: dict[int, int] = {}

    @property
    def num_heads(self) -> int | None:
        """The number of levels that a draft model with one head per level can draft; None for
        another one."""
        states = self.sequence.model(self.runner).spec.states
        return None if states is None or not states.num_heads else states.num_heads

    def start(self, chain: Seq[int] = ()) -> Generator[DecoderAction, Any, None]:
        """Score the text and a first path after it in one pass, and store their candidates."""
        sequence = self.sequence
        sequence.align(self.runner)
        scores = yield sequence.verify(TokenTree.chain(chain), runner=self.runner, grows=True)
        self._samplers[ROOT] = sequence.sampler.fork()
        self.store_candidates(ROOT, scores.row(scores.after(ROOT)))
        for position, token in enumerate(chain):
            node = self.add(token, position - 1)
            self._positions[node] = position
            self._advance_sampler(node)
            self.store_candidates(node, scores.row(scores.after(position)))

    def add(self, token: int, parent: int) -> int:
        """Add a node that is not scored yet; returns its index."""
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return self.tree.add(int(token), parent)

    def expand(self, nodes: Seq[int]) -> Generator[DecoderAction, Any, None]:
        """Score `nodes`, whose parents are scored, in one pass, and store their candidates."""
        if not len(nodes):
            return
        tree = self.tree
        parents = [tree.parents[node] for node in nodes]
        parent_rows = [ROOT if parent == ROOT else self._positions[parent] for parent in parents]
        first = len(self._positions)
        self._positions.update({node: first + position for position, node in enumerate(nodes)})
        tokens = [tree.tokens[node] for node in nodes]
        scores = yield self.sequence.extend(
            tokens, parent_rows, runner=self.runner, variant=self.variant
        )
        for row, node in enumerate(nodes):
            self._advance_sampler(node)
            self.store_candidates(node, scores.row(row))

    def grow_best(
        self, size: int, depth: int, width: int
    ) -> Generator[DecoderAction, Any, list[int]]:
        """Grow the tree of EAGLE-2 (Li et al., arXiv:2406.16858): `depth` times, the `width` nodes
        of a level with the largest weights get their `width` best candidates as children. A node's
        weight is the product of the estimated acceptance probabilities along its path. Returns the
        `size` nodes of the largest weights, ascending."""
        weights = {ROOT: 1.0}
        level = [ROOT]
        for number in range(min(depth, self.num_heads or depth)):
            if number:
                yield from self.expand(level)
            children = []
            for parent in level:
                candidates = self.candidates[parent]
                chances = candidates.acceptance_probabilities[:width]
                for token, chance in zip(candidates.tokens[:width], chances, strict=True):
                    node = self.add(int(token), parent)
                    weights[node] = weights[parent] * float(chance)
                    children.append(node)
            level = sorted(sorted(children, key=lambda node: -weights[node])[:width])
        nodes = [node for node in weights if node != ROOT]
        return sorted(sorted(nodes, key=lambda node: -weights[node])[:size])

    def pruned(self, nodes: Seq[int], kind: str, has_probabilities: bool) -> TokenTree:
        """The tree of `nodes` alone, in their order; their parents must be among them."""
        tree, positions = TokenTree(kind=kind), {ROOT: ROOT}
        for node in nodes:
            positions[node] = tree.add(self.tree.tokens[node], positions[self.tree.parents[node]])
        tops = [
            float(self.candidates[node].probabilities.max())
            for node, position in positions.items()
            if tree.children(position)
        ]
        tree.confidence = sum(tops) / len(tops) if tops else None
        if has_probabilities:
            size = self.sequence.model().spec.vocab_size
            tree.probabilities = {
                positions[node]: candidates.dense(size)
                for node, candidates in self.candidates.items()
                if node in positions and tree.children(positions[node])
            }
        return tree

    def retain(self, tokens: Seq[int]) -> None:
        """Keep the cache entries of the scored nodes along `tokens`, which have been accepted after
        the text."""
        kv_cache = self.sequence.kv_cache(self.runner)
        path, node = [], ROOT
        for token in tokens if self.variant is None else ():
            child = self.tree.child(node, token)
            if child is None or child not in self._positions:
                break
            path.append(self._positions[child])
            node = child
        if kv_cache.pending is not None:
            kv_cache.retain(path)

    def _advance_sampler(self, node: int) -> None:
        sampler = self._samplers[self.tree.parents[node]]
        if sampler.is_stateful:
            sampler = sampler.fork()
            sampler.advance(self.tree.tokens[node])
        self._samplers[node] = sampler

    def store_candidates(self, node: int, row: np.ndarray) -> None:
        """Store the candidates after `node`, from the draft model's logits, float32
        `[vocab_size]`."""
        position = self.sequence.length + (0 if node == ROOT else self.depths[node])
        draw = node + 1 if self.noise == "own" else None
        self.candidates[node] = draft_candidates(
            self.sequence,
            self._samplers[node],
            fit_vocab(self.sequence, row),
            position,
            draw,
            self.noise != "none",
        )

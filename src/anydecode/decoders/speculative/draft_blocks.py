"""Blocks of a drafter that predicts several tokens in one pass: the pass, and the draft tree that
follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from anydecode.decoders.framework.canvas_spans import CanvasSpan, causal_span, score_canvas
from anydecode.decoders.framework.draft_candidates import (
    DraftCandidates,
    draft_candidates,
    fit_vocab,
)
from anydecode.kernels.interface import Rows
from anydecode.models.spec import BlockSpec
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.span import ChainSpan, JointSpan
from anydecode.scoring.tree import ROOT, TokenTree


@dataclass(eq=False)
class BlockSpan(CanvasSpan):
    """The rows of a block, which attend to the context and to each other; never kept.

    Attributes:
        causal_layers: The layers in which a row sees only the rows before it and itself.
    """

    causal_layers: tuple[int, ...] = ()

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        super().write_rows(rows, at, count)
        if not self.causal_layers:
            return
        depth = self.kv_cache.pool.model.spec.num_layers
        if len(self.causal_layers) == depth:
            rows.prefix[at : at + count] = self.positions + 1
            return
        shared = rows.tables.pop()
        for row, position in enumerate(self.positions):
            table = np.tile(shared, (depth, 1))
            table[list(self.causal_layers), position + 1 :] = -1
            rows.table[at + row] = len(rows.tables)
            rows.tables.append(table)


def score_block(sequence: Sequence, block: BlockSpec, size: int) -> ScoreRequest:
    """A request to the runner "draft" whose row i predicts the i-th of `size` tokens after the
    text. It stores what is not in the drafter's cache yet."""
    sequence.align(DRAFT)
    kv_cache, first = sequence.kv_cache(DRAFT), sequence.length - 1
    model: Any = kv_cache.pool.model
    states = model.spec.states
    if states is None or states.has_mask:
        return _score_masks(sequence, block, size)
    if block.mask_token is None:
        return _score_last(sequence, block.size)
    shift = int(block.predicts_next)
    positions = np.arange(first, first + size + 1 - shift, dtype=np.int32)
    tokens = [sequence.all_tokens[-1], *[block.mask_token] * (len(positions) - 1)]
    depth, heads = model.spec.num_layers, model.slot_heads
    span = BlockSpan(
        kv_cache,
        tokens,
        0,
        depth,
        capture_layers=(depth,) if heads is not None and heads.reads_hidden else (),
        positions=positions,
        visible=np.full(len(positions), positions[-1] + 1, np.int32),
        causal_layers=block.causal_layers,
    )
    spans = [*sequence.store_context(DRAFT), span]
    predicted = np.arange(first + 1, first + 1 + size)
    return score_canvas(sequence, DRAFT, spans, 1, predicted, shift)


def _score_last(sequence: Sequence, size: int) -> ScoreRequest:
    """The request of Falcon: rows of the text's tokens, of which the last `size` see each other."""
    request = sequence.score(runner=DRAFT, rows=size)
    (span,) = request.groups[0]
    cache, stop = span.kv_cache, span.stop
    assert span.states is not None, "of a drafter that reads states"
    last = JointSpan(cache, span.tokens[-size:], 0, stop, range(size), span.capture_layers)
    last.states = span.states[-size:]
    request.groups = [[last]]
    if len(span) > size:
        before = ChainSpan(cache, span.tokens[:-size], 0, stop, logits=False)
        before.states = span.states[:-size]
        request.groups = [[before, last]]
    return request


def _score_masks(sequence: Sequence, block: BlockSpec, size: int) -> ScoreRequest:
    """The request of P-EAGLE, ParallelSpec and PARD: rows of the text's tokens, as those of EAGLE
    or of a language model, then mask tokens."""
    assert block.mask_token is not None
    request, kv_cache = sequence.score(runner=DRAFT), sequence.kv_cache(DRAFT)
    model: Any = kv_cache.pool.model
    positions = np.arange(sequence.length - 1, sequence.length - 1 + size)
    masks = [block.mask_token] * (size - 1)
    if masks:
        span = causal_span(kv_cache, positions[1:], np.array(masks))
        if model.spec.states is not None:
            span.states = model.mask_states(len(masks))
        span.output_rows = range(len(masks))
        request.groups[0].append(span)
    request.positions, request.row_parents = positions, list(range(-1, size - 1))
    request.row_tokens = [*request.row_tokens, *masks]
    return request


class BlockTree:
    """The draft tree that follows from the scores of a block, and of further blocks behind it.

    Each slot has one distribution for all nodes of its depth in a block, unless the drafter has
    heads that read the token before. The nodes are added in falling order of their weights, the
    product of the estimated acceptance probabilities along their paths, as far as it is at least
    `threshold`. With a confidence head, a node's children are left out instead where the product of
    the confidences along its path is below `threshold`.

    Args:
        sequence: The sequence to draft for.
        scores: The result of `score_block`.
        is_chain: Whether a node has one child only.
        threshold: See above.
        has_noise: Whether tokens are sampled with the target's noise above temperature 0. False:
            the most probable tokens, as rejection rules require of tokens that are left out by
            their probability.
    """

    def __init__(
        self,
        sequence: Sequence,
        scores: Scores,
        is_chain: bool,
        threshold: float,
        has_noise: bool = True,
    ) -> None:
        self.sequence = sequence
        self.is_chain = is_chain
        self.threshold = threshold
        self.has_noise = has_noise
        model: Any = sequence.model(DRAFT)
        self._heads = model.slot_heads
        self._head_tokens: Any = slice(None) if model.head_tokens is None else model.head_tokens
        self._has_confidence = self._heads is not None and self._heads.has_confidence
        self._tree = TokenTree()
        self._depths = {ROOT: 0}
        self._weights, self._confidences = {ROOT: 1.0}, {ROOT: 1.0}
        self._samplers: dict[int, Sampler] = {ROOT: sequence.sampler.fork()}
        self._states: dict[int, np.ndarray | None] = {ROOT: None}
        self._candidates: dict[int, DraftCandidates] = {}
        self._by_slot: dict[tuple[int, int], DraftCandidates] = {}
        self._heap: list[tuple[float, int, int, int]] = []
        self._order = count()
        self._block_size = len(scores)
        self._roots = {ROOT: ROOT}  # the node that the block with a node's children follows
        self._scores = scores
        self._first_rows = {ROOT: 0}  # of the blocks that are in `_scores`, by what they follow
        self._last_rows = {ROOT: ROOT}  # of blocks in the drafter's tree, by what follows them
        self._push(ROOT, 0)

    def grow(self, size: int) -> TokenTree:
        """The tree of the best `size` nodes."""
        tree = self._tree
        while self._heap and -self._heap[0][0] > self._floor(size):
            weight, _, parent, rank = heappop(self._heap)
            node = tree.add(int(self._candidates[parent].tokens[rank]), parent)
            depth = self._depths[node] = self._depths[parent] + 1
            self._weights[node] = -weight
            self._advance_sampler(node, parent)
            if not self.is_chain:
                self._push(parent, rank + 1)
            self._states[node] = self._states[parent]
            self._confidences[node] = self._confidences[parent]
            self._roots[node] = self._roots[parent] if depth % self._block_size else node
            if self._roots[node] != node:
                self._push(node, 0)
        return self._best(size)

    def next_blocks(self, size: int) -> ScoreRequest | None:
        """A request that scores the blocks behind those nodes at the end of a block whose children
        may be among the best `size` nodes; None if there are none. The result is for `add`."""
        floor = self._floor(size)
        ends = [node for node in self._ends() if self._weights[node] > floor]
        tokens, parents = list[int](), list[int]()
        self._first_rows = {}
        kv_cache = self.sequence.kv_cache(DRAFT)
        num_pending = 0 if kv_cache.pending is None else len(kv_cache.pending.parents)
        for end in ends:
            path = self._tree.path(end)[-self._block_size :]
            self._first_rows[end] = len(tokens)
            first = num_pending + len(tokens)
            before = self._last_rows[self._roots[self._tree.parents[end]]]
            parents += [before, *range(first, first + len(path) - 1)]
            tokens += [self._tree.tokens[node] for node in path]
            self._last_rows[end] = first + len(path) - 1
        if not ends:
            return None
        return self.sequence.extend(tokens, parents, runner=DRAFT, block=self._block_size)

    def add(self, scores: Scores) -> None:
        """Take the scores of the blocks of `next_blocks`."""
        self._scores = scores
        for end in self._first_rows:
            self._push(end, 0)

    def _ends(self) -> Iterator[int]:
        """The nodes at the end of a block that is followed by none yet."""
        for node, root in self._roots.items():
            if node == root and node not in self._last_rows:
                yield node

    def _floor(self, size: int) -> float:
        """The weight that a node must exceed to be among the best `size` nodes."""
        weights = sorted((w for node, w in self._weights.items() if node != ROOT), reverse=True)
        return weights[size - 1] if len(weights) >= size else -1.0

    def _best(self, size: int) -> TokenTree:
        if len(self._tree) <= size:
            return self._tree
        best = sorted(range(len(self._tree)), key=lambda node: -self._weights[node])[:size]
        tree, nodes = TokenTree(), {ROOT: ROOT}
        for node in sorted(best):
            nodes[node] = tree.add(self._tree.tokens[node], nodes[self._tree.parents[node]])
        return tree

    def _push(self, parent: int, rank: int) -> None:
        """Add the candidate of this rank for a child of `parent`, if there is one."""
        if rank == 0:
            self._candidates[parent] = self._find_candidates(parent)
        chances = self._candidates[parent].acceptance_probabilities
        if rank >= len(chances):
            return
        weight = self._weights[parent] * float(chances[rank])
        limit = self._confidences[parent] if self._has_confidence else weight
        if limit >= self.threshold:
            heappush(self._heap, (-weight, next(self._order), parent, rank))

    def _find_candidates(self, node: int) -> DraftCandidates:
        if self._heads is not None or self._samplers[node].is_stateful:
            return self._make_candidates(node)
        slot = self._roots[node], self._depths[node]
        if slot not in self._by_slot:
            self._by_slot[slot] = self._make_candidates(node)
        return self._by_slot[slot]

    def _make_candidates(self, node: int) -> DraftCandidates:
        depth = self._depths[node]
        slot = self._first_rows[self._roots[node]] + depth % self._block_size
        row = self._scores.row(slot)
        if self._heads is not None:
            token = self.sequence.all_tokens[-1] if node == ROOT else self._tree.tokens[node]
            hidden = self._scores.last_state(slot) if self._heads.reads_hidden else None
            step = self._heads.step(token, hidden, self._states[node], depth, row)
            self._states[node] = step.state
            self._confidences[node] *= step.confidence
            if step.bias is not None:
                row = row.copy()
                row[self._head_tokens] += step.bias
        row, position = fit_vocab(self.sequence, row), self.sequence.length + depth
        return draft_candidates(
            self.sequence, self._samplers[node], row, position, has_noise=self.has_noise
        )

    def _advance_sampler(self, node: int, parent: int) -> None:
        sampler = self._samplers[parent]
        if sampler.is_stateful:
            sampler = sampler.fork()
            sampler.advance(self._tree.tokens[node])
        self._samplers[node] = sampler

"""The choice of `auto`'s drafts: the tree with the most expected tokens per second.

The objective is the goodput of Liu et al., SmartSpec, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from anydecode.decoders.framework.ngram_index import SEPARATOR
from anydecode.decoders.speculative.draft_sources import CopySource, DraftRecord, SuccessorPredictor
from anydecode.scoring.tree import ROOT, TokenTree

#: Minimum expected gain of a draft over plain decoding, as a factor.
MIN_GAIN = 1.02
#: Minimum probability of a draft node.
MIN_PROBABILITY = 0.02


@dataclass
class CandidateTree:
    """Draft nodes by falling probability. Parents precede their children, so any prefix of the
    nodes is a tree."""

    tokens: list[int]
    parents: list[int]
    sources: list[str]
    probabilities: list[float]

    def add(self, token: int, parent: int, source: str, probability: float) -> int:
        """Append a node; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.probabilities.append(probability)
        return len(self.tokens) - 1

    def first(self, count: int) -> TokenTree:
        """The tree of the `count` most probable nodes."""
        return TokenTree(self.tokens[:count], self.parents[:count], sources=self.sources[:count])


def grow_tree(
    text: Seq[int],
    sources: Seq[CopySource],
    predictor: SuccessorPredictor,
    count: int,
    min_probability: float,
    forced: Seq[int] = (),
) -> CandidateTree:
    """Grow a draft tree from copies and predictions, the most probable nodes first.

    Where proposals for a position differ, they are ordered by probability, and each gets the
    probability that the ones before it leave.

    Args:
        text: The tokens so far.
        sources: Histories to copy from.
        predictor: Predictions from the model's earlier scores.
        count: Maximum number of nodes after `forced`.
        min_probability: Minimum probability of a node.
        forced: Tokens forced by a constraint, drafted first.
    """
    tree = CandidateTree([], [], [], [])
    for token in forced:
        tree.add(token, len(tree.tokens) - 1, "constraint", 1.0)
    if len(sources) == 1 and not predictor.successors:  # a single source is a chain
        _grow_chain(tree, sources[0], count, min_probability)
        return tree
    chains = [source.cursor.chain(count) for source in sources]
    queue: list[tuple[float, int, int, int, int, str, list[int]]] = []
    order = 0

    def propose(
        node: int, probability: float, before: int, last: int, depth: int, matching: list[int]
    ) -> None:
        nonlocal order
        proposals: list[tuple[str, list[tuple[int, float]]]] = [
            (sources[i].name, [(chains[i][depth], sources[i].probability(depth))])
            for i in matching
            if depth < len(chains[i])
        ]
        predictions = predictor.predictions(before, last)
        if predictions:
            proposals.append(("recycled", predictions))
        remaining, seen = 1.0, set()
        for name, options in sorted(proposals, key=lambda proposal: -proposal[1][0][1]):
            unassigned = remaining
            for token, conditional in options:
                if token in seen:
                    continue
                seen.add(token)
                remaining -= conditional * unassigned
                if probability * conditional * unassigned >= min_probability:
                    order += 1
                    entry = (
                        -probability * conditional * unassigned,
                        order,
                        node,
                        token,
                        depth,
                        name,
                        matching,
                    )
                    heappush(queue, entry)

    tail = [*text[-2:], *forced]
    before, last = (tail[-2], tail[-1]) if len(tail) > 1 else (SEPARATOR, tail[-1])
    propose(len(forced) - 1, 1.0, before, last, 0, list(range(len(sources))))
    parents = {len(forced) - 1: last}
    while queue and len(tree.tokens) < len(forced) + count:
        probability, _, parent, token, depth, name, matching = heappop(queue)
        node = tree.add(token, parent, name, -probability)
        parents[node] = token
        matching = [i for i in matching if depth < len(chains[i]) and chains[i][depth] == token]
        propose(node, -probability, parents[parent], token, depth + 1, matching)
    return tree


def _grow_chain(
    tree: CandidateTree, source: CopySource, count: int, min_probability: float
) -> None:
    """Extend `tree` by up to `count` tokens of one source, none with a probability below
    `min_probability`."""
    probability = 1.0
    for depth, token in enumerate(source.cursor.chain(count)):
        probability *= source.probability(depth)
        if probability < min_probability:
            return
        tree.add(token, len(tree.tokens) - 1, source.name, probability)


def with_chain(tree: CandidateTree, chain: Seq[tuple[int, float]], source: str) -> CandidateTree:
    """`tree` and a chain from another source, the most probable nodes first.

    A node that both have is as probable as if either could be right alone; where they differ, a
    node of `tree` gets the probability that the chain leaves.

    Args:
        tree: Drafts of other sources.
        chain: Tokens with their acceptance probabilities, given that those before are accepted.
        source: The chain's source.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    result = CandidateTree([], [], [], [])
    queue: list[tuple[float, int, int, int, str, int, int]] = []
    order = 0

    def push(parent: int, probability: float, node: int, depth: int) -> None:
        """Queue what follows a node of the result: node `node` of `tree` (-2: none has it) and the
        chain's token at `depth` (the chain's length: it does not go on from here)."""
        nonlocal order
        own = chain[depth] if depth < len(chain) else None
        scale = tree.probabilities[node] if node >= 0 else 1.0
        options: dict[int, tuple[float, int, int, str]] = {}
        for child in children.get(node, ()):
            conditional = tree.probabilities[child] / scale
            token, left = tree.tokens[child], 1.0 - (own[1] if own else 0.0)
            options[token] = (conditional * left, child, len(chain), tree.sources[child])
        if own is not None:
            token, conditional = own
            child, name = -2, source
            if token in options:
                child = options[token][1]
                other = tree.probabilities[child] / scale
                conditional = 1 - (1 - conditional) * (1 - other)
                name = tree.sources[child]
            options[token] = (conditional, child, depth + 1, name)
        for token, (conditional, child, following, name) in options.items():
            order += 1
            entry = (-probability * conditional, order, parent, token, name, child, following)
            heappush(queue, entry)

    push(ROOT, 1.0, ROOT, 0)
    while queue:
        negative, _, parent, token, name, child, following = heappop(queue)
        node = result.add(token, parent, name, -negative)
        push(node, -negative, child, following)
    return result


def best_count(
    probabilities: Iterable[float],
    costs: Seq[float],
    num_others: int,
    draft_seconds: float,
) -> int:
    """The number of draft nodes with which all running sequences generate the most tokens per
    second.

    Args:
        probabilities: Acceptance probabilities of the nodes, falling.
        costs: `costs[n]` is the cost of a pass with n drafts, in seconds.
        num_others: Number of other sequences in the pass.
        draft_seconds: Seconds that a draft takes.
    """
    return best_draft(probabilities, costs, num_others, draft_seconds)[0]


def best_draft(
    probabilities: Iterable[float], costs: Seq[float], num_others: int, draft_seconds: float
) -> tuple[int, float]:
    """`best_count`, and the expected tokens per second."""
    num_tokens = num_others + 1.0
    best, best_rate = 0, MIN_GAIN * num_tokens / costs[0]
    for count, (probability, cost) in enumerate(zip(probabilities, costs[1:], strict=False), 1):
        num_tokens += probability
        rate = num_tokens / (cost + draft_seconds)
        if rate > best_rate:
            best, best_rate = count, rate
    return best, best_rate


@lru_cache(maxsize=256)
def min_useful_probability(
    costs: tuple[float, ...], num_others: int, min_gain: float = MIN_GAIN
) -> float:
    """The smallest probability of the most probable node with which any number of nodes can
    save time; above 1 if no draft can. `min_gain` is the gain that counts, as a factor; the other
    arguments are those of `best_count`."""
    num_tokens = num_others + 1.0
    return min(
        (min_gain * num_tokens * cost / costs[0] - num_tokens) / count
        for count, cost in enumerate(costs[1:], 1)
    )


def model_rate(expected: DraftRecord, costs: Seq[float]) -> float:
    """The expected tokens per second of a sequence that runs alone, in a round with drafts of a
    model.

    Args:
        expected: What such a round brings.
        costs: As for `best_count`.
    """
    below = min(int(expected.rows), len(costs) - 1)
    above = min(below + 1, len(costs) - 1)
    cost = costs[below] + (expected.rows - below) * (costs[above] - costs[below])
    return (1.0 + expected.accepted) / (cost + expected.seconds)

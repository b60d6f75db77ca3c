"""SuffixDecoding: drafts from suffix automata of the request and of earlier answers (Oliaro et al.,
"SuffixDecoding", arXiv:2411.04975; the automaton is that of Blumer et al., 1985).

The longest suffix of the text that occurred before is the match. The tokens that followed its
occurrences form a tree, weighted by frequency.
"""

from __future__ import annotations

from heapq import heappop, heappush

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.ngram_index import SEPARATOR
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Memory of one state of an automaton, in bytes.
_BYTES_PER_STATE = 400


class SuffixAutomaton:
    """All substrings of a growing text. State 0 is the empty string; `counts[s]` is the number of
    occurrences of the strings of state s; `next[s]` maps a token to the next state."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.counts: list[int] = [0]
        self._last = 0

    def extend(self, token: int) -> None:
        """Append one token to the text."""
        state = self._add(self.length[self._last] + 1, {}, 0)
        at = self._last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        self.link[state] = 0 if at < 0 else self._split(at, token)
        self._last = state
        while state > 0:
            self.counts[state] += 1
            state = self.link[state]

    @property
    def repeated_suffix(self) -> int:
        """The state of the longest suffix of the text that occurred before."""
        return max(self.link[self._last], 0)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The state and length of the longest suffix that is a substring, after `token` has
        followed a suffix of length `matched` in `state`."""
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        if token in self.next[state]:
            return self.next[state][token], matched + 1
        return 0, 0

    def _add(self, length: int, following: dict[int, int], count: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.counts.append(count)
        return len(self.length) - 1

    def _split(self, at: int, token: int) -> int:
        successor = self.next[at][token]
        if self.length[successor] == self.length[at] + 1:
            return successor
        clone = self._add(self.length[at] + 1, dict(self.next[successor]), self.counts[successor])
        self.link[clone] = self.link[successor]
        self.link[successor] = clone
        while at >= 0 and self.next[at].get(token) == successor:
            self.next[at][token] = clone
            at = self.link[at]
        return clone


def likely_tree(
    automaton: SuffixAutomaton, state: int, size: int, depth: int, min_probability: float
) -> tuple[TokenTree, float]:
    """The `size` most probable nodes after `state`, at most `depth` deep, and their total
    probability. A child's probability is its parent's times its share of the parent's occurrences.
    """
    tree, total, order = TokenTree(), 0.0, 0
    heap: list[tuple[float, int, int, int, int, int]] = []

    def push_children(state: int, node: int, weight: float, level: int) -> None:
        nonlocal order
        count = automaton.counts[state]
        for token, successor in automaton.next[state].items():
            share = weight * automaton.counts[successor] / count
            if token != SEPARATOR and share >= min_probability:
                order += 1
                heappush(heap, (-share, order, token, successor, node, level))

    if state:
        push_children(state, ROOT, 1.0, 1)
    while heap and len(tree) < size:
        negative, _, token, successor, parent, level = heappop(heap)
        node = tree.add(token, parent)
        total -= negative
        if level < depth:
            push_children(successor, node, -negative, level + 1)
    return tree, total


class SuffixDrafter(Drafter):
    """Drafts from suffix automata.

    Args:
        factor: Maximum depth of a draft, relative to the length of the match.
        min_probability: Minimum probability of a node.
        memory: Number of tokens of earlier answers that are kept.
    """

    requirements = Requirements(takes_prediction=True)

    def __init__(
        self, factor: float = 2.0, min_probability: float = 0.1, memory: int = 200_000
    ) -> None:
        if factor <= 0 or not 0 < min_probability <= 1 or memory < 0:
            raise InvalidRequestError(
                "suffix needs factor > 0, 0 < min_probability <= 1 and memory >= 0"
            )
        self.factor = factor
        self.min_probability = min_probability
        self.memory = memory
        self.past = SuffixAutomaton()
        self.past_tokens = 0

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.past, self.past_tokens = SuffixAutomaton(), 0

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_STATE * len(self.past.length)

    def learn(self, answer: list[int]) -> None:
        """Add a finished answer; when memory is full, all earlier answers are dropped first."""
        if self.past_tokens + len(answer) > self.memory:
            self.clear()
        for token in [*answer, SEPARATOR][: self.memory]:
            self.past.extend(token)
        self.past_tokens += len(answer)


class _Session(TextDraftSession):
    copies_text = True

    def __init__(self, sequence: Sequence, drafter: SuffixDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        self.automaton = SuffixAutomaton()
        self.past = drafter.past
        self._match = (0, 0)

    def read(self, tokens: list[int]) -> None:
        if self.past is not self.drafter.past:
            self.past, self._match = self.drafter.past, (0, 0)
        for token in tokens:
            self.automaton.extend(token)
            self._match = self.past.step(*self._match, token)

    def tree(self, size: int) -> TokenTree:
        drafter = self.drafter
        own_state = self.automaton.repeated_suffix
        state, matched = self._current()
        best, best_total = TokenTree(), 0.0
        for automaton, at, length in (
            (self.automaton, own_state, self.automaton.length[own_state]),
            (self.past, state, matched),
        ):
            depth = int(drafter.factor * length)
            if depth:
                tree, total = likely_tree(automaton, at, size, depth, drafter.min_probability)
                if total > best_total:
                    best, best_total = tree, total
        return best

    def observe(self, round: SpeculationRound) -> None:
        if round.sequence.finished:
            self.drafter.learn(round.sequence.tokens)

    def _current(self) -> tuple[int, int]:
        """The match among earlier answers. Answers added since may have split its state; the
        shorter strings then belong to the state's suffix link."""
        state, matched = self._match
        while state and self.past.length[self.past.link[state]] >= matched:
            state = self.past.link[state]
        self._match = (state, matched)
        return self._match


@register(
    Card(
        "suffix",
        "speculative",
        paper="SuffixDecoding (arXiv:2411.04975)",
        exactness="token-exact",
        summary="Suffix automata of this request and of earlier answers draft by frequency.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "an automaton with occurrence counts instead of the paper's depth-limited suffix tree",
            "only the longest match of each automaton drafts; the paper tries every length and"
            " keeps the most probable tree",
            "`factor` times the match length bounds the depth, and `size` the number of nodes; the"
            " paper bounds the number of nodes by the former",
            "when earlier answers would exceed `memory` tokens, all of them are dropped",
        ),
        remote={"size": Range(0, 64), "factor": Range(0, 16), "min_probability": Range(0, 1)},
    )
)
def suffix(
    size: int = 8, factor: float = 2.0, min_probability: float = 0.1, memory: int = 200_000
) -> Speculative:
    """SuffixDecoding.

    Args:
        size: Maximum number of nodes of a draft tree.
        factor: Maximum depth of a draft, relative to the length of the match.
        min_probability: Minimum probability of a node, above 0 and at most 1.
        memory: Number of tokens of earlier answers that are kept.
    """
    return Speculative(SuffixDrafter(factor, min_probability, memory), size)

"""SuffixDecoding: drafts from suffix automata of the request and of earlier answers (Oliaro et al.,
"SuffixDecoding", arXiv:2411.04975; the automaton is that of Blumer et al., 1985).

A match is a suffix of the text that occurred before. The tokens that followed its occurrences form
a tree, weighted by frequency. Of the trees after all matches, the one with the largest total
probability is drafted: a long match allows more nodes, a short one may be more certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.bounded_table import DEFAULT_MEMORY
from anydecode.decoders.framework.ngram_index import SEPARATOR
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    Speculative,
    TextDraftSession,
)
from anydecode.decoders.framework.text_parts import TextParts
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Memory of one state of an automaton without its transitions, and of one transition, in bytes.
_BYTES_PER_STATE = 200
_BYTES_PER_TRANSITION = 90
#: Maximum length of a match, in tokens.
MAX_MATCH = 64
#: Maximum memory of the automata of a request's own text, in bytes.
TEXT_MEMORY = 64 << 20


class SuffixAutomaton:
    """All substrings of a growing text. State 0 is the empty string; `counts[s]` is the number of
    occurrences of the strings of state s; `next[s]` maps a token to the next state. The strings of
    a state end at the same positions; `length[s]` is the length of the longest, and those shorter
    than all of them belong to `link[s]`."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.counts: list[int] = [0]
        self.num_tokens = 0
        self._num_transitions = 0
        self._last = 0

    @property
    def num_bytes(self) -> int:
        """The estimated memory, in bytes."""
        return _BYTES_PER_STATE * len(self.length) + _BYTES_PER_TRANSITION * self._num_transitions

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token to the text."""
        self.num_tokens += 1
        state = self._add(self.length[self._last] + 1, {}, 0)
        at = self._last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = state
            self._num_transitions += 1
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
        following = dict(self.next[successor])
        self._num_transitions += len(following)
        clone = self._add(self.length[at] + 1, following, self.counts[successor])
        self.link[clone] = self.link[successor]
        self.link[successor] = clone
        while at >= 0 and self.next[at].get(token) == successor:
            self.next[at][token] = clone
            at = self.link[at]
        return clone


#: States of the same string in several automata.
States = list[tuple[SuffixAutomaton, int]]


@dataclass(eq=False)
class Match:
    """The longest suffix of a text that an automaton contains: `length` tokens, in `state`."""

    automaton: SuffixAutomaton
    state: int
    length: int


def shortening(matches: Seq[Match]) -> Iterator[tuple[int, States]]:
    """Yield the lengths of all suffixes that some of `matches` contain, and their states, from the
    longest down (at most `MAX_MATCH`). Of the lengths with the same states, only the largest is
    yielded."""
    states = [match.state for match in matches]
    length = min(max((match.length for match in matches), default=0), MAX_MATCH)
    while length > 0:
        found: States = []
        following = 0
        for index, match in enumerate(matches):
            if match.length < length:
                following = max(following, match.length)
                continue
            automaton, state = match.automaton, states[index]
            shorter = automaton.length[automaton.link[state]]
            while shorter >= length:
                state = automaton.link[state]
                shorter = automaton.length[automaton.link[state]]
            states[index] = state
            following = max(following, shorter)
            found.append((automaton, state))
        yield length, found
        length = following


def likely_tree(
    states: States, size: int, min_probability: float, min_total: float = 0.0
) -> tuple[list[tuple[int, int, float]], float]:
    """The `size` most probable nodes after the string in `states`: token, parent and probability
    of each, and their total probability. A child's probability is its parent's times its share of
    the parent's occurrences, in all automata together. Without nodes if the total is not above
    `min_total`."""
    nodes: list[tuple[int, int, float]] = []
    total, order = 0.0, 0
    heap = [(-1.0, 0, ROOT, states, ROOT)]
    while heap:
        negative, _, token, states, parent = heappop(heap)
        if total - (size - len(nodes)) * negative <= min_total:
            return [], 0.0  # no further node is more probable than this one
        node = ROOT
        if order:
            node = len(nodes)
            nodes.append((token, parent, -negative))
            total -= negative
            if len(nodes) == size:
                break
        for token, share, successors in _children(states, -negative, min_probability):
            order += 1
            heappush(heap, (-share, order, token, successors, node))
    return (nodes, total) if total > min_total else ([], 0.0)


def _children(
    states: States, weight: float, min_probability: float
) -> Iterator[tuple[int, float, States]]:
    """The tokens that follow the string in `states`, of probability `weight`: token, probability
    and states of each, if the probability is at least `min_probability`."""
    automaton, state = states[0]
    all_counts, following = automaton.counts, automaton.next[state]
    count = all_counts[state]
    if len(states) == 1:
        for token, successor in following.items():
            share = weight * all_counts[successor] / count
            if share >= min_probability and token != SEPARATOR:
                yield token, share, [(automaton, successor)]
        return
    counts = {token: all_counts[successor] for token, successor in following.items()}
    for automaton, state in states[1:]:
        all_counts = automaton.counts
        count += all_counts[state]
        for token, successor in automaton.next[state].items():
            counts[token] = counts.get(token, 0) + all_counts[successor]
    for token, child_count in counts.items():
        share = weight * child_count / count
        if share >= min_probability and token != SEPARATOR:
            successors = [(one, one.next[at][token]) for one, at in states if token in one.next[at]]
            yield token, share, successors


def best_tree(
    sources: Seq[Seq[Match]], size: int, factor: float, min_probability: float
) -> TokenTree:
    """The tree with the largest total probability after any match of any source; among equals that
    of the longest match of the first source. After a match of n tokens, a tree has up to
    `factor` n nodes, and at most `size`."""
    best: list[tuple[int, int, float]] = []
    best_total = 0.0
    for matches in sources:
        for length, states in shortening(matches):
            num_nodes = min(size, int(factor * length))
            if num_nodes <= best_total:  # no node is more than certain, and shorter ones have fewer
                break
            nodes, total = likely_tree(states, num_nodes, min_probability, best_total)
            if nodes:
                best, best_total = nodes, total
    tree = TokenTree()
    weights, tops = {ROOT: 1.0}, dict[int, float]()
    for token, parent, weight in best:  # the most probable child of a node comes first
        weights[tree.add(token, parent)] = weight
        tops.setdefault(parent, weight / weights[parent])
    tree.confidence = sum(tops.values()) / len(tops) if tops else None
    return tree


class SuffixDrafter(Drafter):
    """Drafts from suffix automata.

    Args:
        factor: Maximum number of nodes of a draft, relative to the length of the match.
        min_probability: Minimum probability of a node.
        memory: Memory of earlier answers, in bytes.
    """

    requirements = Requirements(takes_prediction=True)

    def __init__(
        self, factor: float = 2.0, min_probability: float = 0.1, memory: int = DEFAULT_MEMORY
    ) -> None:
        if factor <= 0 or not 0 < min_probability <= 1 or memory < 0:
            raise InvalidRequestError(
                "suffix needs factor > 0, 0 < min_probability <= 1 and memory >= 0"
            )
        self.factor = factor
        self.min_probability = min_probability
        self.memory = memory
        self._earlier = TextParts(memory, SuffixAutomaton)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self._earlier = TextParts(self.memory, SuffixAutomaton)

    @property
    def parts(self) -> Seq[SuffixAutomaton]:
        """The automata of earlier answers, the oldest part first."""
        return self._earlier.parts

    @property
    def num_bytes(self) -> int:
        return self._earlier.num_bytes

    def learn(self, answer: list[int]) -> None:
        """Add a finished answer."""
        if self.memory:
            self._earlier.extend([*answer, SEPARATOR])


class _Cursor:
    """Matches the end of a text in one part of texts."""

    def __init__(self, part: SuffixAutomaton) -> None:
        self.match = Match(part, 0, 0)
        self._num_tokens = part.num_tokens
        self._num_read = 0

    def catch_up(self, text: list[int]) -> None:
        """Read the new tokens of `text`; if the part has grown, its last tokens again."""
        match, part = self.match, self.match.automaton
        if self._num_tokens != part.num_tokens:
            self._num_tokens = part.num_tokens
            self._num_read = max(0, len(text) - MAX_MATCH)
            match.state = match.length = 0
        for token in text[self._num_read :]:
            match.state, match.length = part.step(match.state, match.length, token)
        self._num_read = len(text)


class _Session(TextDraftSession):
    copies_text = True
    learns_without_drafts = False

    def __init__(self, sequence: Sequence, drafter: SuffixDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        self._own = TextParts(TEXT_MEMORY, SuffixAutomaton)
        self._cursors: list[_Cursor] = []

    def read(self, tokens: list[int]) -> None:
        self._own.extend(tokens)

    def tree(self, size: int) -> TokenTree:
        drafter = self.drafter
        *before, last = self._own.parts
        earlier = self._matches([*before, *drafter.parts])
        state = last.repeated_suffix
        own = [Match(last, state, last.length[state]), *earlier[: len(before)]]
        sources = [own, earlier[len(before) :]]
        return best_tree(sources, size, drafter.factor, drafter.min_probability)

    def end(self) -> None:
        self.drafter.learn(self.sequence.tokens)

    def _matches(self, parts: Seq[SuffixAutomaton]) -> list[Match]:
        """The longest matches of the text's end in `parts`."""
        by_part = {id(cursor.match.automaton): cursor for cursor in self._cursors}
        self._cursors = [by_part.get(id(part)) or _Cursor(part) for part in parts]
        for cursor in self._cursors:
            cursor.catch_up(self.text)
        return [cursor.match for cursor in self._cursors]


@register(
    Card(
        "suffix",
        "speculative",
        paper="SuffixDecoding (arXiv:2411.04975)",
        exactness="token-exact",
        summary="Suffix automata of this request and of earlier answers draft by frequency.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "automata with occurrence counts instead of the paper's depth-limited suffix trees; of"
            " longer matches the last 64 tokens count",
            "a draft has up to `size` nodes, and none below `min_probability`, that of the released"
            " code; it has up to twice as many as the match has tokens by default (the released"
            " code: as many)",
            "earlier answers are kept in eight parts within `memory` bytes, a request's own text in"
            " eight within 64 MiB, and the oldest part is dropped when they are full; a match does"
            " not reach from one part into another",
            LEARNS_ALONE,
        ),
        bounds={"memory": Range(0, 1 << 40)},
        remote={
            "size": Range(1, 64),
            "factor": Range(0, 16),
            "min_probability": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def suffix(
    size: int = 8,
    factor: float = 2.0,
    min_probability: float = 0.1,
    memory: int = DEFAULT_MEMORY,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """SuffixDecoding.

    Args:
        size: Maximum number of nodes of a draft tree.
        factor: Maximum number of nodes of a draft tree, relative to the length of the match.
        min_probability: Minimum probability of a node, above 0 and at most 1.
        memory: Memory of earlier answers, in bytes.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    drafter = SuffixDrafter(factor, min_probability, memory)
    return Speculative(drafter, size, acceptance_rule(acceptance))

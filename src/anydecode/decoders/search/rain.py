"""RAIN (Li et al., "RAIN: Your Language Models Can Align Themselves without Finetuning",
arXiv:2309.07124).

A tree of possible continuations is searched before a few tokens are taken: a continuation is
sampled to the end of a phrase, the model itself judges the text so far, and the text is rewound.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import Rollout, Rollouts
from anydecode.decoders.framework.valuing import Valuing
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.rewards import registry
from anydecode.rewards.reward import SampledText
from anydecode.sampling.noise import Noise
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import TopK
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

#: The number of tokens of the sets at each depth below the root; deeper ones have the last.
LENGTHS = (1, 2, 4, 10)
#: Candidates are sampled from so many tokens.
TOP_K = 15
#: The weight of the prior probabilities in the selection.
EXPLORATION = 2.0
#: The share of the model's probability in the priors below the root; the rest is uniform.
MODEL_SHARE = 0.75
#: Sets of tokens whose embeddings have this cosine learn from each other's values, and how much.
SIMILAR, SIMILAR_WEIGHT = 0.95, 0.2
#: A node whose continuations are all bad gets more of them if their embeddings vary less.
VARIANCE, MAX_CHILDREN = 0.03, 20
#: The search ends early when the most visited continuation has more visits and a higher value.
SURE_VISITS, SURE_VALUE = 6, 0.8
#: Visits of a root beyond those that it had before.
MIN_ADDED_VISITS = 15
#: A phrase ends with one of these, or after so many tokens.
PHRASE_ENDS, MAX_PHRASE = ",.?:;\n", 64
#: Number of random streams of a sample.
_STREAMS = 4095

JUDGE = (
    "Is the reply {first} or {second}?\n(A) {first}\n(B) {second}\n\nRequest: {prompt}\n"
    "Reply: {reply}\n\nThe letter of the right answer is ("
)


@dataclass(eq=False)
class Node:
    """A set of tokens that may follow its parent's.

    Attributes:
        tokens: The tokens.
        logprobs: Their requested log-probabilities.
        prior: The probability of the set under the model.
        embedding: The direction of its mean token embedding, float64 `[hidden_size]`.
        visits: The number of visits; a similar set's visit counts in part.
        value: The mean of the values that were found behind it; 0 without visits.
        children: What may follow.
        attempts: How often a child was looked for.
        finish_reason: Why the text ends with it, or None.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prior: float = 1.0
    embedding: np.ndarray = field(default_factory=lambda: np.zeros(1))
    visits: float = 0.0
    value: float = 0.0
    children: list[Node] = field(default_factory=list)
    attempts: int = 0
    finish_reason: str | None = None

    def add(self, value: float, weight: float) -> None:
        """Count a visit of `weight` that found `value`."""
        self.visits += weight
        self.value += weight * (value - self.value) / self.visits

    def descendants(self) -> Iterator[Node]:
        """All nodes below."""
        for child in self.children:
            yield child
            yield from child.descendants()


@dataclass
class SearchState:
    """What a restart needs. Changed at the end of a simulation only.

    Attributes:
        root: The node of the text so far.
        first_visits: The visits that the root had when it became the root.
        num_sampled: How many continuations have been sampled, for their random numbers.
        judged: The value of each judged text.
    """

    root: Node = field(default_factory=Node)
    first_visits: float = 0.0
    num_sampled: int = 0
    judged: dict[str, float] = field(default_factory=dict)


_STATE: StateKey[SearchState] = StateKey("rain", "search")
Step = Generator[DecoderAction, ActionResult, None]
Value = Generator[DecoderAction, ActionResult, float]


@register(
    Card(
        "rain",
        "alignment",
        paper="RAIN: Your Language Models Can Align Themselves without Finetuning"
        " (arXiv:2309.07124)",
        exactness="lossy",
        summary="Searches a tree of continuations that the model itself judges, and rewinds, before"
        " it takes a few tokens.",
        works_with=("constraints", "penalties", "logprobs", "batches", "adapters"),
        deviations=(
            "the question to the model is a short one without examples; another reward can be given"
            " in place of it, which small models need",
            "the embedding of a set of tokens is the mean of the model's own token embeddings; the"
            " authors use a sentence encoder",
            "values are normalized among all nodes of the tree, of which those without visits"
            " have value 0",
            "a phrase of the simulation ends after 64 tokens at the latest",
            "a set of tokens that is sampled twice counts once; each attempt to widen counts"
            " against the maximum of 20",
            "an error ends the request; the authors' code ends the text",
        ),
        remote={
            "k": Range(1, 10),
            "simulations": Range(1, 50),
            "reward": registry.RewardName(),
            "good": Text(64),
            "bad": Text(64),
        },
    )
)
class Rain(Decoder):
    """Self-evaluating tree search with rewind.

    A simulation goes down the tree from the text so far, always to the child with the largest
    `value + 2 * prior * sqrt(visits of the parent) / (1 + visits)`, where values are normalized to
    0 to 1. Behind the last node, a continuation is sampled to the end of a phrase; the model is
    asked twice, with the answers in both orders, whether the text is good, which gives -1, 0 or 1;
    and `k` sets of tokens are added as children. The value counts for all nodes of the path, and
    in part for siblings with similar embeddings. When the text's node has enough visits, or one of
    its children is clearly good, the most visited child's tokens are taken.

    The request's temperature and truncations are ignored. This costs hundreds of rows per token.

    Args:
        k: How many sets of tokens may follow a node: a greedy one, and others that are sampled from
            the 15 most probable tokens.
        simulations: Minimum number of visits of the text's node, unless a child is clearly good.
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`, with
            values from -1 to 1, in place of the model's own judgement, which is the default.
        good: What a reply should be, in the question to the model.
        bad: What it should not be.
    """

    def __init__(
        self,
        k: int = 10,
        simulations: int = 50,
        reward: registry.RewardChoice | None = None,
        good: str = "harmless",
        bad: str = "harmful",
    ) -> None:
        if not 1 <= k <= MAX_CHILDREN or simulations < 1:
            raise InvalidRequestError(
                f"rain needs k from 1 to {MAX_CHILDREN} and simulations of at least 1, not"
                f" {k} and {simulations}"
            )
        self.k = k
        self.simulations = simulations
        self.valuing = None if reward is None else Valuing(registry.build(reward), (-1.0, 1.0))
        self.good, self.bad = good, bad
        self.requirements = Requirements(can_sample=False)

    @property
    def num_bytes(self) -> int:
        return 0 if self.valuing is None else self.valuing.num_bytes

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("rain does not work with a second prompt")
        sampler = sequence.sampler
        sequence.sampler = Sampler(1.0, sampler.pre_temperature, (TopK(TOP_K),), sampler.combiner)

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.setdefault(_STATE, SearchState())
        judge = _Judge(sequence, self.good, self.bad)
        while not sequence.finished:
            if len(unscored := sequence.unscored()) > 1:  # all branches share it
                yield sequence.score(unscored[:-1])
            while not self._is_decided(state):
                yield from self._simulate(sequence, state, judge)
            best = max(state.root.children, key=lambda child: (child.visits, child.value))
            state.root, state.first_visits, state.judged = best, best.visits, {}
            sequence.emit(best.tokens, logprobs=best.logprobs)
        judge.release()

    def _is_decided(self, state: SearchState) -> bool:
        """Whether the next tokens can be taken."""
        root = state.root
        if not root.children:
            return False
        best = max(root.children, key=lambda child: (child.visits, child.value))
        if best.visits > SURE_VISITS and best.value > SURE_VALUE:
            return True
        return root.visits >= max(self.simulations, state.first_visits + MIN_ADDED_VISITS)

    def _simulate(self, sequence: Sequence, state: SearchState, judge: _Judge) -> Step:
        """One walk down the tree, with what is found at its end."""
        path = self.selected(state.root)
        node = path[-1]
        if node.children:
            yield from self._widen(sequence, state, path)
            return
        leaf = _Leaf(sequence, path)
        sampled = state.num_sampled
        children: list[Node] = []
        if node.finish_reason is None:
            children = yield from leaf.candidates(self.k, _length(len(path)), sampled, phrase=True)
        text = leaf.text
        leaf.release()
        value = yield from self._value(sequence, state, judge, text)
        state.num_sampled += self.k
        node.children = children
        node.attempts = self.k
        backed_up(path, value)

    def _widen(self, sequence: Sequence, state: SearchState, path: list[Node]) -> Step:
        """Look for another child of the last node of `path`."""
        leaf, node = _Leaf(sequence, path), path[-1]
        found = yield from leaf.candidates(2, _length(len(path)), state.num_sampled, phrase=False)
        leaf.release()
        state.num_sampled += 2
        node.attempts += 1
        known = [child.tokens for child in node.children]
        node.children += [child for child in found if child.tokens not in known][-1:]

    def selected(self, root: Node) -> list[Node]:
        """The nodes from the root to one without children, or to one that needs more of them."""
        values = [node.value for node in root.descendants()] or [0.0]
        low, spread = min(values), max(values) - min(values)
        path = [root]
        while path[-1].children and not is_widened(path[-1]):
            path.append(max(path[-1].children, key=lambda one: _rank(path, one, low, spread)))
        return path

    def _value(
        self, sequence: Sequence, state: SearchState, judge: _Judge, text: SampledText
    ) -> Value:
        """The value of a text, from -1 to 1."""
        if self.valuing is not None:
            [value] = yield from self.valuing.values(sequence, [text])
            return value
        if text.text not in state.judged:
            state.judged[text.text] = yield from judge.value(text.text)
        return state.judged[text.text]


class _Leaf:
    """The sequence with the tokens of a path behind it."""

    def __init__(self, sequence: Sequence, path: list[Node]) -> None:
        self.sequence = sequence
        tokens = [token for node in path[1:] for token in node.tokens]
        self.group = Rollouts(sequence, [Rollout(sequence.noise, tokens)])
        [self.branch] = self.group.open_branches()
        [self.text] = self.group.texts()

    def candidates(
        self, count: int, length: int, first: int, *, phrase: bool
    ) -> Generator[DecoderAction, ActionResult, list[Node]]:
        """Up to `count` different sets of `length` tokens, the greedy one first. With `phrase`,
        `text` becomes the text with a continuation to the end of a phrase.

        Args:
            count: The number of sets.
            length: The number of tokens.
            first: The number of continuations that have been sampled before.
            phrase: Whether to sample the phrase.
        """
        noise = self.sequence.noise.with_purpose("search")
        greedy = Rollouts(self.branch, [Rollout(noise)], sums_logprobs=True, temperature=0.0)
        yield from greedy.extend(lambda number: len(greedy.rollouts[0].tokens) >= length)
        self.branch.truncate(self.branch.length - 1)  # so that its last row is computed again
        sampled = Rollouts(
            self.branch,
            [Rollout(_stream(noise, first + number)) for number in range(count)],
            sums_logprobs=True,
        )

        def is_done(number: int) -> bool:
            one = sampled.rollouts[number]
            if phrase and number == 0:
                added = sampled.text(0)[len(self.text.text) :]
                return len(one.tokens) >= MAX_PHRASE or any(end in added for end in PHRASE_ENDS)
            return len(one.tokens) >= length

        yield from sampled.extend(is_done)
        if phrase:
            self.text = sampled.texts()[0]
        rollouts = [greedy.rollouts[0], *sampled.rollouts[1:]]
        greedy.release()
        sampled.release()
        nodes: list[Node] = []
        for one in rollouts:
            if one.tokens not in [node.tokens for node in nodes]:
                embedding = self._embedding(one.tokens)
                prior = math.exp(one.total)
                nodes.append(
                    Node(
                        one.tokens, one.logprobs, prior, embedding, finish_reason=one.finish_reason
                    )
                )
        return nodes

    def release(self) -> None:
        """Free the memory."""
        self.group.release()

    def _embedding(self, tokens: list[int]) -> np.ndarray:
        embed = getattr(self.branch.kv_cache().pool.model, "embed", None)
        if embed is None:
            raise UnsupportedCombinationError("rain needs a model whose embeddings can be read")
        mean = np.asarray(embed(np.array(tokens)), np.float64).mean(axis=0)
        unit: np.ndarray = mean / max(float(np.linalg.norm(mean)), 1e-300)
        return unit


class _Judge:
    """Asks the model whether a text is good. The branches of both questions keep their caches, so
    that what two questions have in common at their beginning is computed once."""

    def __init__(self, sequence: Sequence, good: str, bad: str) -> None:
        self.tokenizer = sequence.tokenizers[TARGET]
        self.prompt = self.tokenizer.decode(sequence.prompt)
        self.orders = ((good, bad), (bad, good))
        self.branches = [sequence.fork() for _ in self.orders]
        for branch in self.branches:
            branch.tokens = []
        self.letters = [self.tokenizer.encode(one, special=False)[-1] for one in "AB"]

    def value(self, reply: str) -> Value:
        """-1 if it is bad, 1 if it is good, 0 if the answers differ."""
        requests = []
        for branch, (first, second) in zip(self.branches, self.orders, strict=True):
            question = JUDGE.format(first=first, second=second, prompt=self.prompt, reply=reply)
            branch.prompt = self.tokenizer.encode(question)
            branch.align(TARGET)
            requests.append(branch.score())
        results = yield requests
        is_first = [scores.row(-1)[self.letters[0]] > scores.row(-1)[self.letters[1]]
                    for scores in results]  # fmt: skip
        return float(is_first[0]) - float(is_first[1])

    def release(self) -> None:
        """Free the memory."""
        for branch in self.branches:
            branch.release()


def backed_up(path: list[Node], value: float) -> None:
    """Count `value` for all nodes of a path, and in part for their similar siblings."""
    path[0].add(value, 1.0)
    for parent, node in zip(path[:-1], path[1:], strict=True):
        node.add(value, 1.0)
        for sibling in parent.children:
            similarity = float(sibling.embedding @ node.embedding)
            if sibling is not node and similarity >= SIMILAR:
                sibling.add(value, SIMILAR_WEIGHT * similarity)


def is_widened(node: Node) -> bool:
    """Whether the children of a node are all bad, too similar, and not too many."""
    children = node.children
    if node.attempts >= MAX_CHILDREN or max(child.value for child in children) >= 0:
        return False
    variances = np.var([child.embedding for child in children], axis=0)
    return bool(np.linalg.norm(variances) < VARIANCE * len(children))


def _rank(path: list[Node], child: Node, low: float, spread: float) -> float:
    """By how much `child` of the last node of `path` should be visited."""
    parent = path[-1]
    prior = child.prior
    if len(path) == 1:
        prior = MODEL_SHARE * prior + (1 - MODEL_SHARE) / len(parent.children)
    value = (child.value - low) / spread if spread else 0.0
    return value + EXPLORATION * prior * math.sqrt(parent.visits) / (1 + child.visits)


def _length(depth: int) -> int:
    """The number of tokens of a set at `depth` below the root, from 1."""
    return LENGTHS[min(depth, len(LENGTHS)) - 1]


def _stream(noise: Noise, number: int) -> Noise:
    return noise.forked(1 + number % _STREAMS)

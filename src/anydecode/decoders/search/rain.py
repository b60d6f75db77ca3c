"""RAIN (Li et al., "RAIN: Your Language Models Can Align Themselves without Finetuning",
arXiv:2309.07124).

A tree of possible continuations is searched before a few tokens are taken: a continuation is
sampled to the end of a phrase, the model itself judges the text so far, and the text is rewound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import Rollout, Rollouts, log_probability
from anydecode.decoders.framework.valuing import Valuing
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.rewards import registry
from anydecode.rewards.reward import SampledText
from anydecode.sampling.candidates import descending
from anydecode.sampling.noise import Noise
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import TopK
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

#: The number of tokens of the sets at each depth below the beginning of the answer; deeper ones
#: have the last.
LENGTHS = (1, 2, 4, 10)
#: Sets of several tokens are sampled from so many tokens.
TOP_K = 15
#: The weight of the prior probabilities in the selection.
EXPLORATION = 2.0
#: The share of the model's probability in the priors of the root's children; the rest is uniform.
MODEL_SHARE = 0.75
#: Sets of tokens whose texts' embeddings have this cosine learn from each other's values, and how
#: much.
SIMILAR, SIMILAR_WEIGHT = 0.95, 0.2
#: A node whose continuations are all bad gets another one if their embeddings vary less, for each
#: token of a set.
VARIANCE, MAX_CHILDREN = 0.03, 20
#: The search ends early when the most visited continuation has more visits and a higher value.
SURE_VISITS, SURE_VALUE = 6, 0.8
#: Simulations from a root beyond those that it had before.
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
        depth: The number of sets from the beginning of the answer to this one, itself included.
        probability: The probability of the set under the model, among `TOP_K` tokens at each
            position.
        prior: Its share of the probabilities of the parent's sets.
        total: The sum of the log-probabilities of the answer's tokens up to its end, of the model's
            unmodified logits.
        embedding: The mean embedding of the texts that began with the set, float64 `[hidden_size]`;
            None without any.
        visits: The number of visits; a similar set's visit counts in part.
        num_simulations: The number of its own visits.
        value: The mean of the values that were found behind it; 0 without visits.
        children: What may follow.
        finish_reason: Why the text ends with it, or None.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    depth: int = 0
    probability: float = 1.0
    prior: float = 1.0
    total: float = 0.0
    embedding: np.ndarray | None = None
    visits: float = 0.0
    num_simulations: int = 0
    value: float = 0.0
    children: list[Node] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, value: float, weight: float) -> None:
        """Count a visit of `weight` that found `value`."""
        self.visits += weight
        self.value += weight * (value - self.value) / self.visits

    def most_visited(self) -> Node:
        """The child with the most visits, of equal ones the one with the best value."""
        return max(self.children, key=lambda child: (child.visits, child.value))


@dataclass
class SearchState:
    """What a restart needs. Changed at the end of a simulation, and where a node has been widened.

    Attributes:
        root: The node of the text so far.
        first_simulations: The simulations that the root had when it became the root.
        num_sampled: How many continuations have been sampled, for their random numbers.
        widened: The nodes that the current simulation has widened.
        judged: The value of each judged text.
    """

    root: Node = field(default_factory=Node)
    first_simulations: int = 0
    num_sampled: int = 0
    widened: list[Node] = field(default_factory=list)
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
            "the embedding of a text is the direction of the mean of the model's own token"
            " embeddings; the authors use a sentence encoder",
            "a phrase of the simulation ends after 64 tokens at the latest, and a set with the end"
            " of the text",
            "the prior of an added set is its share of the probabilities of all sets; the authors'"
            " code counts the greedy one twice and leaves out the last",
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
    `value + 2 * prior * sqrt(visits of the parent) / (1 + visits)`, where values from -1 to 1
    become 0 to 1, and those without visits count as 0. Behind the last node, a continuation is
    sampled to the end of a phrase, unless one ends there; the model is asked twice, with the
    answers in both orders, whether the text is good, which gives -1, 0 or 1; and up to `k` sets of
    tokens are added as children: at the beginning of the answer the `k` most probable tokens, then
    sets of 2, 4, and 10 tokens, of which one is greedy and the others are sampled. The value counts
    for all nodes of the path, and in part for siblings with similar embeddings. When the text's
    node has enough simulations, or its most visited child is clearly good, that child's tokens are
    taken.

    The request's temperature and truncations are ignored. This costs hundreds of rows per token.

    Args:
        k: How many sets of tokens may follow a node at first.
        simulations: Minimum number of simulations behind the text's node, unless a child is clearly
            good.
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
            best = state.root.most_visited()
            state.root, state.first_simulations = best, best.num_simulations
            state.judged = {}
            mix_priors(best.children)
            sequence.emit(best.tokens, logprobs=best.logprobs)
        judge.release()

    def _is_decided(self, state: SearchState) -> bool:
        """Whether the next tokens can be taken."""
        root, first = state.root, state.first_simulations
        if root.num_simulations == first:
            return False
        best = root.most_visited()
        if best.num_simulations > SURE_VISITS and best.value > SURE_VALUE:
            return True
        return root.num_simulations >= max(self.simulations, first + MIN_ADDED_VISITS)

    def _simulate(self, sequence: Sequence, state: SearchState, judge: _Judge) -> Step:
        """One walk down the tree, with what is found at its end."""
        path = [state.root]
        while path[-1].children:
            if is_widened(path[-1]) and path[-1] not in state.widened:
                yield from self._widen(sequence, state, path)
            path.append(selected(path[-1]))
        leaf, node = _Leaf(sequence, path), path[-1]
        phrase: list[int] = []
        children: list[Node] = []
        if node.finish_reason is None:
            phrase = yield from leaf.phrase(state.num_sampled)
            children = yield from leaf.candidates(self.k, state.num_sampled + 1)
        text = leaf.text
        leaf.release()
        value = yield from self._value(sequence, state, judge, text)
        state.num_sampled += self.k
        state.widened = []
        node.children = children
        set_priors(children, node is state.root)
        backed_up(path, value, [leaf.embedding(tokens) for tokens in _texts(path, phrase)])

    def _widen(self, sequence: Sequence, state: SearchState, path: list[Node]) -> Step:
        """Look for another child of the last node of `path`."""
        leaf, node = _Leaf(sequence, path), path[-1]
        count = len(node.children) + 1 if _length(node) == 1 else 2
        found = yield from leaf.candidates(count, state.num_sampled)
        leaf.release()
        state.num_sampled += 1
        state.widened.append(node)
        known = [child.tokens for child in node.children]
        added = [child for child in found if child.tokens not in known]
        sets = [*node.children, *added]
        before = [child.prior for child in node.children]
        set_priors(sets, node is state.root)
        for child, prior in zip(node.children, before, strict=True):
            child.prior = prior
        node.children = sets

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
        self.node = path[-1]
        self.noise = sequence.noise.with_purpose("search")
        tokens = [token for node in path[1:] for token in node.tokens]
        self.group = Rollouts(sequence, [Rollout(sequence.noise, tokens, total=self.node.total)],
                              sums_logprobs=True)  # fmt: skip
        [self.branch] = self.group.open_branches()
        [self.text] = self.group.texts()

    def phrase(self, stream: int) -> Generator[DecoderAction, ActionResult, list[int]]:
        """A sampled continuation to the end of a phrase, with which `text` goes on: none if a
        phrase ends here.

        Args:
            stream: The number of its random stream.
        """
        prompt = self.sequence.tokenizers[TARGET].decode(self.sequence.prompt)
        if (prompt + self.text.text)[-1:] in tuple(PHRASE_ENDS):
            return []
        rollout = Rollout(_stream(self.noise, stream), total=self.node.total)
        group = Rollouts(self.branch, [rollout], sums_logprobs=True, temperature=1.0)

        def is_done(number: int) -> bool:
            return len(rollout.tokens) >= MAX_PHRASE or group.text(0)[-1:] in tuple(PHRASE_ENDS)

        yield from self._extend(group, is_done)
        [self.text] = group.texts()
        group.release()
        return rollout.tokens

    def candidates(
        self, count: int, stream: int
    ) -> Generator[DecoderAction, ActionResult, list[Node]]:
        """Up to `count` different sets of tokens: the most probable tokens, or the greedy set and
        sampled ones.

        Args:
            count: The number of sets.
            stream: The number of the first random stream.
        """
        length = _length(self.node)
        if length == 1:
            return (yield from self._most_probable(count))
        nodes: list[Node] = []
        for numbers, temperature in ((range(1), 0.0), (range(count - 1), None)):
            rollouts = [
                Rollout(_stream(self.noise, stream + number), total=self.node.total)
                for number in numbers
            ]
            logs = [0.0] * len(rollouts)

            def on_token(
                number: int, branch: Sequence, row: np.ndarray, token: int, logs: list[float] = logs
            ) -> None:
                logs[number] += _truncated(branch, TOP_K).distribution(row).log_probability(token)

            group = Rollouts(
                self.branch, rollouts, sums_logprobs=True, temperature=temperature,
                on_token=on_token,
            )  # fmt: skip

            def is_done(number: int, rollouts: list[Rollout] = rollouts) -> bool:
                return len(rollouts[number].tokens) >= length

            if rollouts:
                yield from self._extend(group, is_done)
            group.release()
            for one, log in zip(rollouts, logs, strict=True):
                if one.tokens not in [node.tokens for node in nodes]:
                    nodes.append(self._node(one, math.exp(log)))
        if sampled := [node.probability for node in nodes[1:]]:
            least = min(nodes[0].probability, sum(sampled))
            nodes[0].probability = max(least, max(sampled) + min(sampled))
        return nodes

    def release(self) -> None:
        """Free the memory."""
        self.group.release()

    def embedding(self, tokens: list[int]) -> np.ndarray:
        """The direction of the mean embedding of `tokens`, float64 `[hidden_size]`."""
        embed = getattr(self.sequence.kv_cache().pool.model, "embed", None)
        if embed is None:
            raise UnsupportedCombinationError("rain needs a model whose embeddings can be read")
        mean = np.asarray(embed(np.array(tokens)), np.float64).mean(axis=0)
        unit: np.ndarray = mean / max(float(np.linalg.norm(mean)), 1e-300)
        return unit

    def _most_probable(self, count: int) -> Generator[DecoderAction, ActionResult, list[Node]]:
        """The sets of the `count` most probable tokens, the most probable first."""
        branch = self.branch
        scores = yield branch.score()
        row = scores.row(-1).copy()
        distribution = _truncated(branch, count).distribution(row)
        shares = distribution.probabilities()
        tokens = np.arange(len(shares)) if distribution.tokens is None else distribution.tokens
        rollouts = []
        for token in tokens[descending(shares)].tolist():
            logprobs = []
            if branch.compute_logprobs is not None:
                logprobs = [branch.compute_logprobs(row, token, branch.sampler)]
            total = self.node.total + log_probability(row, token)
            rollouts.append(Rollout(self.noise, [token], logprobs, total))
        group = Rollouts(branch, rollouts)
        group.open_branches()
        group.release()
        return [
            self._node(one, math.exp(distribution.log_probability(one.tokens[0])))
            for one in rollouts
        ]

    def _extend(self, group: Rollouts, is_done: Callable[[int], bool]) -> Step:
        yield from group.extend(is_done)
        self.branch.truncate(self.branch.length - 1)  # so that its last row is computed again

    def _node(self, one: Rollout, probability: float) -> Node:
        return Node(
            one.tokens, one.logprobs, self.node.depth + 1, probability, total=one.total,
            finish_reason=one.finish_reason,
        )  # fmt: skip


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
        """1 if both answers are that it is good, -1 if none is, otherwise 0."""
        requests = []
        for branch, (first, second) in zip(self.branches, self.orders, strict=True):
            question = JUDGE.format(first=first, second=second, prompt=self.prompt, reply=reply)
            branch.prompt = self.tokenizer.encode(question)
            branch.align(TARGET)
            requests.append(branch.score())
        results = yield requests
        a, b = ([scores.row(-1)[letter] for scores in results] for letter in self.letters)
        return float(a[0] > b[0]) + float(b[1] > a[1]) - 1.0

    def release(self) -> None:
        """Free the memory."""
        for branch in self.branches:
            branch.release()


def set_priors(nodes: list[Node], is_root: bool) -> None:
    """Give each of a node's children its share of their probabilities."""
    total = sum(node.probability for node in nodes)
    for node in nodes:
        node.prior = node.probability / total
    if is_root:
        mix_priors(nodes)


def mix_priors(nodes: list[Node]) -> None:
    """Mix the priors of the root's children with equal ones."""
    mixed = [MODEL_SHARE * node.prior + (1 - MODEL_SHARE) / len(nodes) for node in nodes]
    for node, prior in zip(nodes, mixed, strict=True):
        node.prior = prior / sum(mixed)


def selected(parent: Node) -> Node:
    """The child that is visited next."""

    def rank(child: Node) -> float:
        value = (child.value + 1) / 2 if child.visits else 0.0
        return value + EXPLORATION * child.prior * math.sqrt(parent.visits) / (1 + child.visits)

    return max(parent.children, key=rank)


def backed_up(path: list[Node], value: float, embeddings: list[np.ndarray]) -> None:
    """Count `value` for all nodes of a path, and in part for their similar siblings.

    Args:
        path: The nodes from the root.
        value: From -1 to 1.
        embeddings: Of each node but the root, that of the text from its set on.
    """
    path[0].num_simulations += 1
    path[0].add(value, 1.0)
    for parent, node, embedding in zip(path[:-1], path[1:], embeddings, strict=True):
        node.num_simulations += 1
        node.add(value, 1.0)
        mean = np.zeros_like(embedding) if node.embedding is None else node.embedding
        node.embedding = mean + (embedding - mean) / node.num_simulations
        for sibling in parent.children:
            if sibling is node or sibling.embedding is None:
                continue
            lengths = np.linalg.norm(node.embedding) * np.linalg.norm(sibling.embedding)
            similarity = float(node.embedding @ sibling.embedding) / max(float(lengths), 1e-300)
            if similarity >= SIMILAR:
                sibling.add(value, SIMILAR_WEIGHT * similarity)


def is_widened(node: Node) -> bool:
    """Whether the children of a node are all bad, too similar, and not too many."""
    children = node.children
    embeddings = [one.embedding for one in children if one.embedding is not None]
    if not 1 < len(embeddings) == len(children) < MAX_CHILDREN:
        return False
    if max(child.value for child in children) >= 0:
        return False
    variances = np.var(embeddings, axis=0, ddof=1)
    return bool(np.linalg.norm(variances) < VARIANCE * len(children[0].tokens))


def _texts(path: list[Node], phrase: list[int]) -> list[list[int]]:
    """Of each node of a path but the root, the tokens from its set on."""
    texts: list[list[int]] = []
    for node in path[:0:-1]:
        phrase = [*node.tokens, *phrase]
        texts.insert(0, phrase)
    return texts


def _length(node: Node) -> int:
    """The number of tokens of the sets behind a node."""
    return LENGTHS[min(node.depth, len(LENGTHS) - 1)]


def _truncated(branch: Sequence, count: int) -> Sampler:
    """Samples from the `count` most probable tokens."""
    sampler = branch.sampler
    return Sampler(1.0, sampler.pre_temperature, (TopK(count),), sampler.combiner)


def _stream(noise: Noise, number: int) -> Noise:
    return noise.forked(1 + number % _STREAMS)

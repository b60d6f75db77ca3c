"""RAIN (Li et al., "RAIN: Your Language Models Can Align Themselves without Finetuning",
arXiv:2309.07124).

A tree of possible continuations is searched before a few tokens are taken: a continuation is
sampled to the end of a phrase, the model itself judges the text so far, and the text is rewound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator
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
#: The share of the cache that the keys and values of branches may hold which are kept to save time,
#: and the number of questions of each order of answers that are kept.
MAX_HELD, MAX_ASKED = 0.25, 64
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
    What was computed of the tree and of earlier questions is kept, in up to a quarter of the cache,
    so that few rows are computed twice.

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
        self.requirements = Requirements(can_sample=False, forks_text=True)

    @property
    def num_bytes(self) -> int:
        return 0 if self.valuing is None else self.valuing.num_bytes

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("rain does not work with a second prompt")
        if not hasattr(sequence.model(), "embed"):
            raise UnsupportedCombinationError("rain needs a model whose embeddings can be read")
        sampler = sequence.sampler
        sequence.sampler = Sampler(1.0, sampler.pre_temperature, (TopK(TOP_K),), sampler.combiner)

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.setdefault(_STATE, SearchState())
        kept = _KeptCaches(sequence)
        judge = _Judge(sequence, self.good, self.bad)
        while not sequence.finished:
            if state.root in kept:
                sequence.share_caches(kept[state.root])
            elif len(unscored := sequence.unscored()) > 1:  # all branches share it
                yield sequence.score(unscored[:-1])
            while not self._is_decided(state):
                kept.make_room()
                judge.make_room()
                yield from self._simulate(sequence, state, kept, judge)
            best = state.root.most_visited()
            state.root, state.first_simulations = best, best.num_simulations
            state.judged = {}
            kept.keep_only(best)
            mix_priors(best.children)
            sequence.emit(best.tokens, logprobs=best.logprobs)
        kept.release()
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

    def _simulate(
        self, sequence: Sequence, state: SearchState, kept: _KeptCaches, judge: _Judge
    ) -> Step:
        """One walk down the tree, with what is found at its end."""
        path = [state.root]
        while path[-1].children:
            if is_widened(path[-1]) and path[-1] not in state.widened:
                yield from self._widen(sequence, state, path, kept)
            path.append(selected(path[-1]))
        leaf, node = _Leaf(sequence, path, kept), path[-1]
        phrase: list[int] = []
        children: list[Node] = []
        if node.finish_reason is None:
            phrase, children = yield from leaf.explored(self.k, state.num_sampled)
        text = leaf.text
        leaf.release()
        value = yield from self._value(sequence, state, judge, text)
        state.num_sampled += self.k
        state.widened = []
        node.children = children
        set_priors(children, node is state.root)
        backed_up(path, value, [leaf.embedding(tokens) for tokens in _texts(path, phrase)])

    def _widen(
        self, sequence: Sequence, state: SearchState, path: list[Node], kept: _KeptCaches
    ) -> Step:
        """Look for another child of the last node of `path`."""
        leaf, node = _Leaf(sequence, path, kept), path[-1]
        found = yield from leaf.another(state.num_sampled)
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


class _KeptCaches(dict[Node, Sequence]):
    """Branches that hold the keys and values of what was computed up to a node, the last token of
    its set excluded, so that no text is computed twice while there is room."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.sequence = sequence

    def keep(self, node: Node, branch: Sequence) -> None:
        """Keep the caches of `branch`, whose text ends with `node`."""
        self[node] = self.sequence.fork()
        self[node].share_caches(branch)

    def keep_only(self, root: Node) -> None:
        """Free all but those of `root` and what is below it."""
        below, waiting = set(), [root]
        while waiting:
            below.add(node := waiting.pop())
            waiting += node.children
        for node in self.keys() - below:
            self.pop(node).release()

    def make_room(self) -> None:
        """Free all if they hold more than their share of the cache."""
        if is_too_much(self.values()):
            self.release()

    def release(self) -> None:
        """Free all."""
        for branch in self.values():
            branch.release()
        self.clear()


class _Leaf:
    """The sequence with the tokens of a path behind it."""

    def __init__(self, sequence: Sequence, path: list[Node], kept: _KeptCaches) -> None:
        self.sequence = sequence
        self.node = path[-1]
        self.kept = kept
        self.noise = sequence.noise.with_purpose("search")
        tokens = [token for node in path[1:] for token in node.tokens]
        self.group = Rollouts(sequence, [Rollout(sequence.noise, tokens, total=self.node.total)],
                              sums_logprobs=True)  # fmt: skip
        [self.branch] = self.group.open_branches()
        [self.text] = self.group.texts()
        if self.node in kept:
            self.branch.share_caches(kept[self.node])

    def explored(
        self, count: int, stream: int
    ) -> Generator[DecoderAction, ActionResult, tuple[list[int], list[Node]]]:
        """A sampled continuation to the end of a phrase, with which `text` goes on, and sets of
        tokens that may follow. The continuation is empty if a phrase ends here.

        Args:
            count: The number of sets. There are fewer if some are equal.
            stream: The number of the first random stream, which is that of the phrase.
        """
        phrase = []
        prompt = self.sequence.tokenizers[TARGET].decode(self.sequence.prompt)
        if (prompt + self.text.text)[-1:] not in tuple(PHRASE_ENDS):
            phrase = [Rollout(_stream(self.noise, stream), total=self.node.total, temperature=1.0)]
        is_single = _length(self.node) == 1
        streams = range(stream + 1, stream + count)
        sets = [] if is_single else [Rollout(self.noise, total=self.node.total, temperature=0.0)]
        sets += [] if is_single else [self._set(one) for one in streams]
        row, nodes = yield from self._extend(phrase, sets)
        if is_single:
            if row is None:
                scores = yield self.branch.score()
                row = scores.row(-1)
            nodes = self._most_probable(row, count)
        elif sampled := [node.probability for node in nodes[1:]]:
            least = min(nodes[0].probability, sum(sampled))
            nodes[0].probability = max(least, max(sampled) + min(sampled))
        return phrase[0].tokens if phrase else [], nodes

    def another(self, stream: int) -> Generator[DecoderAction, ActionResult, list[Node]]:
        """A further set of tokens, sampled with the random stream `stream`, or the most probable
        tokens, one more than there are children."""
        if _length(self.node) == 1:
            scores = yield self.branch.score()
            return self._most_probable(scores.row(-1), len(self.node.children) + 1)
        _, nodes = yield from self._extend([], [self._set(stream)])
        return nodes

    def release(self) -> None:
        """Free the memory."""
        self.group.release()

    def _set(self, stream: int) -> Rollout:
        """A sampled set of tokens."""
        return Rollout(_stream(self.noise, stream), total=self.node.total)

    def _extend(
        self, phrase: list[Rollout], sets: list[Rollout]
    ) -> Generator[DecoderAction, ActionResult, tuple[np.ndarray | None, list[Node]]]:
        """Sample the phrase, with which `text` goes on, and the sets, side by side, so that equal
        beginnings are computed once.

        Returns:
            The logits behind the leaf, if they were computed, and the nodes of the different sets,
            with their probabilities.
        """
        logs, length = [0.0] * len(sets), _length(self.node)
        rows: list[np.ndarray] = []

        def on_token(number: int, branch: Sequence, row: np.ndarray, token: int) -> None:
            if not rows:
                rows.append(row.copy())
            if number >= len(phrase):
                distribution = _truncated(branch, TOP_K).distribution(row)
                logs[number - len(phrase)] += distribution.log_probability(token)

        def is_done(number: int) -> bool:
            count = len(group.rollouts[number].tokens)
            if number >= len(phrase):
                return count >= length
            return count >= MAX_PHRASE or group.text(number)[-1:] in tuple(PHRASE_ENDS)

        group = Rollouts(self.branch, phrase + sets, sums_logprobs=True, on_token=on_token)
        if group.rollouts:
            yield from group.extend(is_done)
        if phrase:
            self.text = group.texts()[0]
        nodes: list[Node] = []
        for number, (one, log) in enumerate(zip(sets, logs, strict=True), len(phrase)):
            if one.tokens not in [node.tokens for node in nodes]:
                nodes.append(self._node(one, math.exp(log), group.branch(number)))
        group.release()
        return (rows[0] if rows else None), nodes

    def embedding(self, tokens: list[int]) -> np.ndarray:
        """The direction of the mean embedding of `tokens`, float64 `[hidden_size]`."""
        model: Any = self.sequence.model()
        mean = np.asarray(model.embed(np.array(tokens)), np.float64).mean(axis=0)
        unit: np.ndarray = mean / max(float(np.linalg.norm(mean)), 1e-300)
        return unit

    def _most_probable(self, row: np.ndarray, count: int) -> list[Node]:
        """The sets of the `count` most probable tokens, the most probable first."""
        branch = self.branch
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
        nodes = [
            self._node(one, math.exp(distribution.log_probability(one.tokens[0])), end)
            for one, end in zip(rollouts, group.open_branches(), strict=True)
        ]
        group.release()
        return nodes

    def _node(self, one: Rollout, probability: float, branch: Sequence) -> Node:
        """The node of a set that ends `branch`."""
        node = Node(
            one.tokens, one.logprobs, self.node.depth + 1, probability, total=one.total,
            finish_reason=one.finish_reason,
        )  # fmt: skip
        if node.finish_reason is None:
            self.kept.keep(node, branch)
        return node


class _Judge:
    """Asks the model whether a text is good. The branches of earlier questions keep their caches,
    so that what questions have in common at their beginnings is computed once."""

    def __init__(self, sequence: Sequence, good: str, bad: str) -> None:
        self.tokenizer = sequence.tokenizers[TARGET]
        self.prompt = self.tokenizer.decode(sequence.prompt)
        self.orders = ((good, bad), (bad, good))
        self.asked = [[sequence.fork()] for _ in self.orders]
        for [branch] in self.asked:
            branch.tokens = []
        self.letters = [self.tokenizer.encode(one, special=False)[-1] for one in "AB"]

    def value(self, reply: str) -> Value:
        """1 if both answers are that it is good, -1 if none is, otherwise 0."""
        requests = []
        for asked, (first, second) in zip(self.asked, self.orders, strict=True):
            question = JUDGE.format(first=first, second=second, prompt=self.prompt, reply=reply)
            tokens = self.tokenizer.encode(question)
            branch = max(asked, key=lambda one: _num_common(one.prompt, tokens)).branch()
            branch.prompt = tokens
            branch.align(TARGET)
            asked.append(branch)
            requests.append(branch.score())
        results = yield requests
        a, b = ([scores.row(-1)[letter] for scores in results] for letter in self.letters)
        return float(a[0] > b[0]) + float(b[1] > a[1]) - 1.0

    def make_room(self) -> None:
        """Free all questions but the last if they are too many or hold too much of the cache."""
        if len(self.asked[0]) > MAX_ASKED or is_too_much(sum(self.asked, [])):
            for asked in self.asked:
                while len(asked) > 1:
                    asked.pop(0).release()

    def release(self) -> None:
        """Free the memory."""
        for branch in sum(self.asked, []):
            branch.release()


def is_too_much(branches: Collection[Sequence]) -> bool:
    """Whether branches that only save time hold more than their share of the cache."""
    caches = [branch.kv_cache() for branch in branches]
    if not caches:
        return False
    is_held = np.zeros(caches[0].pool.num_slots, bool)
    for one in caches:
        is_held[one.table] = True
    return bool(is_held.mean() > MAX_HELD)


def _num_common(tokens: list[int], others: list[int]) -> int:
    """How many of the first tokens are the same."""
    low, high = 0, min(len(tokens), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[:middle] == others[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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

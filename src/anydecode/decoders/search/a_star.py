"""A*-Decoding (Chatziveroglou, "A*-Decoding: Token-Efficient Inference Scaling",
arXiv:2505.13672).

Texts grow step by step in a tree. The beginning that is extended next is the one with the smallest
sum of its cost so far and of a reward model's estimate of the cost that is left.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import MAX_ROLLOUTS, Rollout, Rollouts, StepRule
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.beam import emit_ranked
from anydecode.errors import InvalidRequestError
from anydecode.rewards import registry
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Maximum number of steps that are sampled: the number of random streams of a sample.
MAX_STREAMS = 4095


@dataclass(frozen=True)
class Node:
    """A beginning of a text.

    Attributes:
        depth: The number of its steps.
        cost: The sum of the increases of `left` along its steps.
        left: The estimate of the cost that is left: 1 less its reward.
        order: How many steps were sampled before it.
    """

    depth: int
    cost: float
    left: float
    order: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Beginnings are extended in this order: of equal sums the deeper one, then the older."""
        return self.cost + self.left, -self.depth, self.order


@dataclass
class Frontier:
    """What a restart needs: the beginnings, their rollouts, the whole texts that were found, and
    how many beginnings have been extended. Changed at the end of an extension only."""

    nodes: list[Node]
    rollouts: list[Rollout]
    found: list[RankedText] = field(default_factory=list)
    num_expansions: int = 0

    @property
    def best(self) -> int:
        """The beginning that is extended next."""
        return min(range(len(self.nodes)), key=lambda number: self.nodes[number].rank)


_STATE: StateKey[Frontier] = StateKey("a-star", "frontier")
Searching = Generator[DecoderAction, ActionResult, None]


@register(
    Card(
        "a-star",
        "search",
        paper="A*-Decoding: Token-Efficient Inference Scaling (arXiv:2505.13672)",
        exactness="lossy",
        summary="Extends the beginning of a text with the smallest cost so far and estimated rest,"
        " step by step, until the best one is a whole text.",
        works_with=("constraints", "samplers", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when the search ends, not while it runs",
            "the default reward is the geometric mean of the probabilities of the text's tokens"
            " under the model itself; the paper's is a trained process reward model, which is given"
            " as a function",
            "number and length of the steps, the budgets, the order of equal sums and the estimate"
            " before the first step are not published",
            "steps that are sampled twice from the same beginning count once",
        ),
        remote={
            "k": Range(1, 8),
            "reward": registry.RewardName(),
            "step": Text(16),
            "step_tokens": Range(1, 1024),
            "expansions": Range(1, 64),
            "frontier": Range(1, 64),
        },
    )
)
class AStar(Decoder):
    """Best-first search over steps of a text.

    A reward r from 0 to 1 values every beginning s. The estimated rest of its cost is
    `h(s) = 1 - r(s)`; its cost `g(s)` grows with every step by the increase of h, if h increases.
    The beginning with the smallest `g + h` is extended by `k` sampled steps. If it is a whole text,
    it is the answer. If the number of extensions is used up, the answer is the whole text with the
    best reward; if there is none, the best beginning is continued greedily to its end.

    If the reward of a beginning is that of its best continuation, the search goes straight to the
    best text that it can sample. A request with `n` above 1 receives the whole texts that were
    found, the answer first and the others by their rewards. At temperature 0 there is one step per
    extension, and the text is that of greedy decoding.

    Args:
        k: How many steps are sampled from a beginning.
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`, with
            values from 0 to 1, also of texts that go on.
        step: The text that ends a step. Default: a blank line.
        step_tokens: Maximum number of tokens of a step.
        expansions: How many beginnings are extended at most.
        frontier: How many beginnings are kept.
    """

    def __init__(
        self,
        k: int = 4,
        reward: registry.RewardChoice = "confidence",
        step: str = "\n\n",
        step_tokens: int = 256,
        expansions: int = 64,
        frontier: int = 64,
    ) -> None:
        if min(k, step_tokens, expansions, frontier) < 1 or not step:
            raise InvalidRequestError(
                "a-star needs a step, and k, step_tokens, expansions and frontier of at least 1,"
                f" not {step!r}, {k}, {step_tokens}, {expansions} and {frontier}"
            )
        if k * expansions > MAX_STREAMS or frontier > MAX_ROLLOUTS:
            raise InvalidRequestError(
                f"a-star: k is {k}, expansions is {expansions} and frontier is {frontier}; k times"
                f" expansions may be up to {MAX_STREAMS}, and frontier up to {MAX_ROLLOUTS}"
            )
        self.k = k
        self.valuing = Valuing(registry.build(reward), (0.0, 1.0))
        self.step = StepRule(step, step_tokens)
        self.expansions = expansions
        self.frontier = frontier
        self.requirements = Requirements(max_texts=k * expansions, forks_text=True)

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes

    def decode(self, sequence: Sequence) -> Decoding:
        empty = Frontier([Node(0, 0.0, 1.0, 0)], [Rollout(sequence.noise)])
        state = sequence.state.setdefault(_STATE, empty)
        reads = self.valuing.reward.reads_logprobs
        copies = [one.copy(one.noise) for one in state.rollouts]
        group = Rollouts(sequence, copies, sums_logprobs=reads)
        if state.num_expansions:  # after a restart
            yield from group.extend(lambda number: True)
        while not (state.num_expansions == self.expansions or self._is_over(state)):
            yield from self._expand(sequence, state, group)
        if not state.found:
            yield from self._finish(sequence, state, group)
        group.release()
        texts = sorted(state.found, key=lambda text: -text.score)
        if self._is_over(state):
            tokens = state.rollouts[state.best].tokens
            texts.sort(key=lambda text: text.tokens != tokens)
        emit_ranked(sequence, texts)

    @staticmethod
    def _is_over(state: Frontier) -> bool:
        """Whether the best beginning is a whole text."""
        return state.rollouts[state.best].finished

    def _expand(self, sequence: Sequence, state: Frontier, group: Rollouts) -> Searching:
        """Replace the best beginning by those with one step more."""
        best, k = state.best, 1 if sequence.sampler.is_greedy else self.k
        parent, kept = state.nodes[best], [n for n in range(len(state.nodes)) if n != best]
        first = 1 + state.num_expansions * self.k
        noises = [group.rollouts[number].noise for number in kept]
        noises += [sequence.noise.forked(first + number) for number in range(k)]
        group.resample([*kept, *[best] * k], noises)
        for number in range(len(kept), len(noises)):
            if parent.depth:
                group.begin_step(number)
        yield from group.extend(lambda n: n < len(kept) or self.step.is_done(group, n))
        values = yield from self.valuing.values(sequence, group.texts()[len(kept) :])
        nodes = {number: state.nodes[old] for number, old in enumerate(kept)}
        seen: list[list[int]] = []
        for number, value in enumerate(values, start=len(kept)):
            rollout = group.rollouts[number]
            if rollout.tokens in seen:
                continue
            seen.append(rollout.tokens)
            cost = parent.cost + max(0.0, 1 - value - parent.left)
            order = first + number - len(kept)
            nodes[number] = Node(parent.depth + 1, cost, 1 - value, order)
            if rollout.finished:
                state.found.append(RankedText(value, rollout.tokens, rollout.logprobs))
        chosen = sorted(nodes, key=lambda number: nodes[number].rank)[: self.frontier]
        group.resample(chosen, [group.rollouts[number].noise for number in chosen])
        state.nodes = [nodes[number] for number in chosen]
        state.rollouts = [one.copy(one.noise) for one in group.rollouts]
        state.num_expansions += 1

    def _finish(self, sequence: Sequence, state: Frontier, group: Rollouts) -> Searching:
        """Continue the best beginning greedily to its end."""
        best = state.best
        last = group.forked([best], [group.rollouts[best].noise], temperature=0.0)
        yield from last.extend(lambda number: False)
        [value] = yield from self.valuing.values(sequence, last.texts())
        last.release()
        [text] = last.rollouts
        state.found.append(RankedText(value, text.tokens, text.logprobs))

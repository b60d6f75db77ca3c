"""The default decoder: speculates when drafts pay, and decodes plainly when they do not.

It measures how often copies from the text, from earlier answers and from the caller's prediction of
the answer are accepted, by match length.
It also measures this for the tokens that the model itself ranked highest when it last scored the
same tokens, drafted or not. Before every pass these rates and the measured cost of a pass give the
draft with the most expected tokens per second: none, a chain or a tree. The objective is the
goodput of Liu et al., SmartSpec, arXiv:2406.14066.

The cost includes the rows of every running sequence, so drafts must pay for slowing the others
down. Between drafts it decodes as the method `multi-step` does, several tokens per multi-step
burst. Where no draft can pay, none is searched for. Tokens forced by a constraint are drafted
first, since they are always accepted."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt
from time import perf_counter

from anydecode.catalogue import Card, Range, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.ngram_index import SEPARATOR, NgramIndex
from anydecode.decoders.framework.speculation import SpeculationRound, verify_tree
from anydecode.decoders.speculative.match_cursor import NGRAM_SIZES, MatchCursor
from anydecode.decoders.speculative.successors import NUM_SUCCESSORS, Successors
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Minimum expected gain of a draft over plain decoding, as a factor.
MIN_GAIN = 1.02
#: Minimum probability of a draft node.
MIN_PROBABILITY = 0.02
#: Lower bounds of the match-length classes.
MATCH_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 20, 32, 64)
#: Prior acceptance rate of a copied token by match-length class, in greedy (True) and in sampled
#: texts of a small model. `PRIOR_WEIGHT` is the number of observations that the priors count for.
PRIORS = {
    True: (0.25, 0.53, 0.65, 0.72, 0.79, 0.85, 0.91, 0.95, 0.98, 0.995),
    False: (0.18, 0.4, 0.55, 0.57, 0.68, 0.76, 0.85, 0.92, 0.97, 0.99),
}
#: Memory of one token of earlier answers, or of one pair of tokens, in bytes.
_BYTES_PER_TOKEN = 300
#: Prior acceptance rates of the model's most probable successors: two of a token pair, then two of
#: a single token.
SUCCESSOR_PRIORS = {
    True: (0.6, 0.08, 0.4, 0.09),
    False: (0.45, 0.12, 0.18, 0.1),
}
#: If a pass takes fewer seconds per sequence, the model's top tokens are not recorded: finding them
#: in the logits of one sequence takes some 50 microseconds and saves one pass in thirty.
MIN_PASS_SECONDS = 0.008
#: Initial frequency of passes with a draft, in greedy and in sampled texts, and the number of
#: tokens over which it is averaged. As many tokens as lie between two drafts, on average, are
#: generated in one multi-step burst, up to `MAX_MULTI_STEP`.
DRAFT_FREQUENCY = {True: 0.25, False: 0.1}
FREQUENCY_WINDOW = 16
MAX_MULTI_STEP = 4
PRIOR_WEIGHT = 8.0
#: Number of recent observations that a rate is averaged over.
RATE_MEMORY = 60.0
#: Number of standard errors subtracted from a rate to get its lower bound.
NUM_STANDARD_ERRORS = 0.5

_CLASS = [
    max(i for i, low in enumerate(MATCH_LENGTHS) if low <= max(n, 1))
    for n in range(MATCH_LENGTHS[-1])
]
_EMPTY_TREE = TokenTree()


def class_of(length: int) -> int:
    """The index into `MATCH_LENGTHS` of a match length."""
    return _CLASS[length] if length < MATCH_LENGTHS[-1] else len(MATCH_LENGTHS) - 1


class AcceptanceRates:
    """Acceptance rates by kind of draft; old observations decay."""

    def __init__(self, prior: Iterable[float], weight: float = PRIOR_WEIGHT) -> None:
        self.hits = [rate * weight for rate in prior]
        self.tries = [weight] * len(self.hits)
        self._bounds = [self._bound(kind) for kind in range(len(self.hits))]

    def __getitem__(self, kind: int) -> float:
        """The lower bound of a kind's rate: the observed rate less `NUM_STANDARD_ERRORS` standard
        errors."""
        return self._bounds[kind]

    def record(self, kind: int, hit: bool) -> None:
        """Record whether a draft of this kind was right."""
        if self.tries[kind] >= RATE_MEMORY:
            self.hits[kind] *= 1 - 1 / RATE_MEMORY
            self.tries[kind] -= 1
        self.hits[kind] += hit
        self.tries[kind] += 1
        self._bounds[kind] = self._bound(kind)

    def rates(self) -> list[float]:
        """The rate of every kind."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True)]

    def _bound(self, kind: int) -> float:
        tries = self.tries[kind]
        rate = self.hits[kind] / tries
        return rate - NUM_STANDARD_ERRORS * sqrt(max(rate * (1 - rate), 0.0) / tries)


class CopySource:
    """A history to copy drafts from: a cursor in it, and the acceptance rates of its drafts."""

    def __init__(self, name: str, history: NgramIndex, rates: AcceptanceRates) -> None:
        self.name = name
        self.cursor = MatchCursor(history)
        self.rates = rates

    def probability(self, depth: int = 0) -> float:
        """The acceptance probability of the token at `depth` of the copied chain, if all before it
        are accepted; 0 without a match."""
        length = self.cursor.length
        return self.rates[class_of(length + depth)] if length else 0.0

    def read(self, text: list[int], scored: bool) -> None:
        """Move on to `text`. With `scored`, its last token came from the model and counts for the
        rates."""
        length = self.cursor.length
        is_hit = self.cursor.step(text)
        if scored and is_hit is not None:
            self.rates.record(class_of(length), is_hit)

    def advanced(self, text: list[int], tokens: list[int]) -> CopySource:
        """This source after `text` and `tokens`."""
        other = CopySource(self.name, self.cursor.history, self.rates)
        other.cursor = self.cursor.advanced(text, tokens)
        return other


class SuccessorPredictor:
    """Predicts the model's next token from its most probable tokens when it last scored the same
    context tokens."""

    def __init__(self, successors: Successors, rates: AcceptanceRates) -> None:
        self.successors = successors
        self.rates = rates

    def predictions(self, before: int, last: int) -> list[tuple[int, float]]:
        """The next-token candidates with their acceptance probabilities, most probable first."""
        first, tokens = self.successors.find(before, last)
        return [(token, self.rates[first + rank]) for rank, token in enumerate(tokens)]

    def read(self, before: int, last: int, token: int) -> None:
        """Record that the model generated `token` after `before` and `last`."""
        for kind, hit in self.successors.outcomes(before, last, token):
            self.rates.record(kind, hit)


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


def best_count(
    probabilities: Iterable[float], costs: Seq[float], num_others: int, draft_seconds: float
) -> int:
    """The number of draft nodes with which all running sequences generate the most tokens per
    second.

    Args:
        probabilities: Acceptance probabilities of the nodes, falling.
        costs: `costs[n]` is the cost of a pass with n drafts, in seconds.
        num_others: Number of other sequences in the pass.
        draft_seconds: Seconds that a draft takes.
    """
    num_tokens = num_others + 1.0
    best, best_rate = 0, MIN_GAIN * num_tokens / costs[0]
    for count, (probability, cost) in enumerate(zip(probabilities, costs[1:], strict=False), 1):
        num_tokens += probability
        rate = num_tokens / (cost + draft_seconds)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def min_useful_probability(costs: Seq[float], num_others: int) -> float:
    """The smallest probability of the most probable node with which any number of nodes can pay;
    above 1 if no draft pays. Arguments as for `best_count`."""
    num_tokens = num_others + 1.0
    return min(
        (MIN_GAIN * num_tokens * cost / costs[0] - num_tokens) / count
        for count, cost in enumerate(costs[1:], 1)
    )


class _Session:
    """The state of `auto` for one sequence."""

    def __init__(self, sequence: Sequence, decoder: Auto) -> None:
        self.sequence = sequence
        self.max_drafts = decoder.max_drafts
        self.history = NgramIndex(NGRAM_SIZES)
        copy_rates, past_rates, successor_rates = decoder.rates[sequence.sampler.is_greedy]
        self.sources = [CopySource("copy", self.history, copy_rates)]
        self.predictor = SuccessorPredictor(decoder.successors, successor_rates)
        if len(decoder.past):
            self.sources.append(CopySource("past", decoder.past, past_rates))
        if sequence.prediction is not None:
            predicted = NgramIndex(NGRAM_SIZES)
            predicted.extend([*sequence.prediction.history, SEPARATOR])
            rates = decoder.prediction_rates[sequence.sampler.is_greedy]
            self.sources.append(CopySource("prediction", predicted, rates))
        self.cost_model = sequence.cost_model
        self.width = 1 + len(sequence.companion_prompts)
        self.is_constrained = constraint_state(sequence.sampler) is not None
        self.draft_seconds = 0.0
        self._decoder = decoder
        self._draft_frequency = DRAFT_FREQUENCY[sequence.sampler.is_greedy]
        self._num_undrafted = 1
        self._allows_multi_step = sequence.end_tokens is not None
        self._costs = [0.0]
        self._pass_seconds = 0.0  # seconds of a pass without a draft
        self._seconds_per_sequence = 0.0  # the same, per sequence in the pass
        self._min_useful_probability = 0.0  # of the most probable node of a draft
        self._costs_key = (-1, -1)
        self._read(sequence.prompt, scored=False)

    def _catch_up(self) -> None:
        """Read the tokens generated since the last call."""
        num_read = len(self.history) - len(self.sequence.prompt)
        self._read(self.sequence.tokens[num_read:])

    def _read(self, tokens: Seq[int], scored: bool = True) -> None:
        text, append = self.history.tokens, self.history.append
        for token in tokens:
            if scored and self.predictor.successors and len(text) > 1:
                self.predictor.read(text[-2], text[-1], token)
            append(token)
            for source in self.sources:
                source.read(text, scored)

    def draft(self) -> TokenTree:
        """The draft for the next pass, or an empty tree."""
        sequence = self.sequence
        num_others = self.cost_model.num_others()
        costs = self._pass_costs(num_others)
        max_drafts = min(self.max_drafts, sequence.remaining - 1)
        if (
            self._min_useful_probability > 1.0
            or max_drafts < 1
            or sequence.length - sequence.kv_cache().length > 1
        ):
            return _EMPTY_TREE  # no draft can pay, at the end, or before the prompt is scored
        self._catch_up()
        state = constraint_state(sequence.sampler) if self.is_constrained else None
        forced = state.forced_tokens()[:max_drafts] if state is not None else []
        # Checked before growing a tree: growing trees that do not pay would make `auto` slower than
        # plain decoding.
        if not forced and self._max_probability() < self._min_useful_probability:
            return _EMPTY_TREE
        sources = self.sources
        if forced:
            sources = [source.advanced(self.history.tokens, forced) for source in sources]
        tree = self._best_tree(forced, sources, costs[: max_drafts + 1], num_others)
        if state is not None and len(tree):
            tree = pruned([], tree, state)
        return tree

    def multi_step_count(self, tree: TokenTree) -> int:
        """The number of tokens to generate before the next search for a draft, given the draft just
        found; 0: verify the draft or decode plainly. The first token of an answer is generated
        alone."""
        self._draft_frequency += min(1.0, self._num_undrafted / FREQUENCY_WINDOW) * (
            bool(len(tree)) - self._draft_frequency
        )
        self._num_undrafted = 1
        if len(tree) or not self._can_multi_step():
            return 0
        if self.sequence.tokens:
            self._num_undrafted = int(1 / max(self._draft_frequency, 1 / MAX_MULTI_STEP))
        return self._num_undrafted

    def _can_multi_step(self) -> bool:
        """Whether tokens may be generated in multi-step bursts: tokens need not be checked one by
        one, and passes are too short to learn from their logits."""
        return self._allows_multi_step and self._seconds_per_sequence < MIN_PASS_SECONDS

    def multi_step(self, count: int) -> Decoding:
        """Generate `count` tokens without drafts: in one burst if the sequence runs alone and the
        backend supports it, else one token per pass."""
        sequence, decoder = self.sequence, self._decoder
        is_alone, start = not self.cost_model.num_others(), len(sequence.tokens)
        while not sequence.finished and (remaining := start + count - len(sequence.tokens)) > 0:
            start_time = perf_counter()
            request = sequence.multi_step(remaining if is_alone else 1)
            tokens = yield request
            seconds_per_token = (perf_counter() - start_time) / len(tokens)
            if is_alone and len(tokens) > 1:
                relative_cost = min(max(seconds_per_token / self._pass_seconds, 0.5), 1.0)
                decoder.multi_step_cost += 0.1 * (relative_cost - decoder.multi_step_cost)
            if sequence.trace is not None:
                for position, token in enumerate(tokens, sequence.length):
                    facts = {
                        "position": position,
                        "draft_seconds": 0.0,
                        "verify_seconds": seconds_per_token,
                    }
                    sequence.record(_EMPTY_TREE, [], [token], **facts)
            sequence.emit(tokens, request.sampler)
        self._num_undrafted = len(sequence.tokens) - start

    def _max_probability(self) -> float:
        """The acceptance probability of the most probable next token."""
        probabilities = [source.probability() for source in self.sources]
        text = self.history.tokens
        if self.predictor.successors and len(text) > 1:
            probabilities += [
                probability for _, probability in self.predictor.predictions(text[-2], text[-1])[:1]
            ]
        return max(probabilities)

    def observe(self, round: SpeculationRound, root: int) -> None:
        """Record the model's most probable successors of every scored node, accepted or not. `root`
        is the position of the token that the draft followed."""
        tree, text = round.tree, self.history.tokens
        if (
            self._seconds_per_sequence < MIN_PASS_SECONDS
            or root < 1
            or len(round.scores) != len(tree) + 1
        ):
            return
        self._catch_up()
        learn = self.predictor.successors.learn
        best = round.scores.top(NUM_SUCCESSORS)[0].tolist()
        learn(text[root - 1], text[root], best[0])
        for token, parent, top_tokens in zip(tree.tokens, tree.parents, best[1:], strict=True):
            learn(text[root] if parent == ROOT else tree.tokens[parent], token, top_tokens)

    def _best_tree(
        self, forced: list[int], sources: list[CopySource], costs: list[float], num_others: int
    ) -> TokenTree:
        """`forced` and the nodes after it that pay."""
        sources = [source for source in sources if source.probability() >= MIN_PROBABILITY]
        max_nodes = len(costs) - 1 - len(forced)
        # A node less probable than the cost of the cheapest row in tokens cannot pay.
        tokens_per_second = (num_others + 1) / costs[0]
        min_probability = (
            min((cost - costs[0]) / n for n, cost in enumerate(costs) if n) * tokens_per_second
        )
        min_probability = max(min_probability, MIN_PROBABILITY)
        tree = grow_tree(
            self.history.tokens, sources, self.predictor, max_nodes, min_probability, forced
        )
        return tree.first(best_count(tree.probabilities, costs, num_others, self.draft_seconds))

    def _pass_costs(self, num_others: int) -> list[float]:
        """The costs of passes with 0 to `max_drafts` drafts, including the rows of all other
        sequences. Updated when `num_others` changes, and every 64 tokens."""
        key = (num_others, self.sequence.length // 64)
        if key != self._costs_key:
            context, seconds, width = self.sequence.length, self.cost_model.seconds, self.width
            self._costs = [
                seconds(num_others + width * (1 + count), context)
                for count in range(self.max_drafts + 1)
            ]
            self._pass_seconds = self._costs[0]
            self._seconds_per_sequence = self._pass_seconds / (num_others + 1)
            if self._can_multi_step() and not num_others:  # plain decoding is multi-step then
                self._costs[0] *= self._decoder.multi_step_cost
            self._min_useful_probability = min_useful_probability(self._costs, num_others)
            self._costs_key = key
        return self._costs

    def record_draft_seconds(self, seconds: float) -> None:
        """Update the moving average of the seconds spent on drafting and learning from drafts."""
        self.draft_seconds += 0.1 * (seconds - self.draft_seconds)


@register(
    Card(
        "auto",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066), its objective",
        exactness="token-exact",
        summary=(
            "Chooses the draft source, chain or tree and size before every pass;"
            " decodes plainly where no draft pays."
        ),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "lengths are chosen per request and pass, from acceptance rates by match length, not"
            " from one moving average",
            "acceptance rates start from priors measured on a small model, and count with their"
            " lower bounds",
            "a draft must gain 2 %; costs are measured while the engine runs, not profiled"
            " beforehand",
            "between drafts a sequence that runs alone decodes up to four tokens per multi-step"
            " burst; drafts are not searched for meanwhile",
            "tokens forced by a constraint are drafted whenever drafts can pay",
            "when earlier answers would exceed `memory` tokens, all of them are dropped",
        ),
        remote={"max_drafts": Range(0, 64)},
    )
)
class Auto(Decoder):
    """The default decoder: drafts that pay, chosen before every pass.

    Args:
        max_drafts: Maximum number of drafts per pass.
        memory: Number of tokens of earlier answers that are kept to copy from.
    """

    requirements = Requirements(takes_prediction=True)

    def __init__(self, max_drafts: int = 32, memory: int = 100_000) -> None:
        if max_drafts < 1 or memory < 0:
            raise InvalidRequestError("auto needs max_drafts >= 1 and memory >= 0")
        self.max_drafts = max_drafts
        self.memory = memory
        self.acceptance = TokenExact()
        self.multi_step_cost = 1.0  # of a multi-step token, relative to a pass over one row
        self.clear()

    def clear(self) -> None:
        """Reset everything learned from earlier requests."""
        self.past = NgramIndex(NGRAM_SIZES)
        self.successors = Successors()
        self.rates = {
            greedy: (
                AcceptanceRates(prior),
                AcceptanceRates(prior),
                AcceptanceRates(SUCCESSOR_PRIORS[greedy]),
            )
            for greedy, prior in PRIORS.items()
        }
        self.prediction_rates = {greedy: AcceptanceRates(prior) for greedy, prior in PRIORS.items()}

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_TOKEN * (len(self.past) + len(self.successors))

    def decode(self, sequence: Sequence) -> Decoding:
        session = _Session(sequence, self)
        while not sequence.finished:
            start, root = perf_counter(), sequence.length - 1
            tree = session.draft()
            if count := session.multi_step_count(tree):
                yield from session.multi_step(count)
                continue
            draft_seconds = perf_counter() - start
            round = yield from verify_tree(sequence, tree, self.acceptance, draft_seconds)
            start = perf_counter()
            session.observe(round, root)
            if len(tree):
                session.record_draft_seconds(draft_seconds + perf_counter() - start)
        self._learn(sequence.tokens)

    def _learn(self, answer: list[int]) -> None:
        if len(self.past) + len(answer) >= self.memory:
            self.past = NgramIndex(NGRAM_SIZES)
        if len(self.successors) >= self.memory:
            self.successors = Successors()
        if len(answer) < self.memory:
            self.past.extend([*answer, SEPARATOR])

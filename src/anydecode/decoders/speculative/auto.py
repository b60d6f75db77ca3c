"""The default decoder: drafts where drafting pays, and is plain decoding where it does not.

It keeps score of what repetitions of the text (and of earlier answers) would have predicted, by how
long the match was, whether they were drafted or not. From these rates and the measured cost of a
pass it chooses, before every pass, the draft that says most tokens per second: none, a chain or a
tree. The objective is the goodput of Liu et al., SmartSpec, arXiv:2406.14066. What a constraint
forces is drafted first, since it is sure to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from math import sqrt
from time import perf_counter

from anydecode.catalogue import Card, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.decoders.speculative.copies import BREAK, Corpus, Follower
from anydecode.decoders.speculative.core import verified
from anydecode.errors import InvalidRequestError
from anydecode.scoring.cost import Pace, guessed
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: A draft must promise this much more than plain decoding.
LEAST_GAIN = 1.02
#: Branches less likely than this are not grown.
LEAST_CHANCE = 0.02
#: Match lengths are told apart up to here.
CLASSES = (1, 2, 3, 4, 6, 9, 14, 20)
#: How often a guess behind a match of each class is right, in greedy (True) and in sampled texts of
#: a small model, and how many guesses that knowledge is worth.
PRIORS = {
    True: (0.25, 0.53, 0.65, 0.72, 0.79, 0.85, 0.91, 0.97),
    False: (0.18, 0.4, 0.55, 0.57, 0.68, 0.76, 0.85, 0.9),
}
PRIOR_WEIGHT = 8.0
#: Guesses older than about this many count no more.
MEMORY = 60.0
#: By how many standard errors rates are lowered before anything is staked on them.
CAUTION = 0.5

_CLASS = [max(i for i, low in enumerate(CLASSES) if low <= max(n, 1)) for n in range(CLASSES[-1])]
_NOTHING = TokenTree()


def class_of(length: int) -> int:
    """The index into `CLASSES` of a match length."""
    return _CLASS[length] if length < CLASSES[-1] else len(CLASSES) - 1


class Rates:
    """How often guesses came true, by class of match length; old ones fade."""

    def __init__(self, prior: Iterable[float] = PRIORS[True], weight: float = PRIOR_WEIGHT) -> None:
        self.hits = [share * weight for share in prior]
        self.tries = [weight] * len(self.hits)
        self._bounds = [self._bound(index) for index in range(len(self.hits))]

    def __getitem__(self, length: int) -> float:
        """What the rate behind a match of `length` tokens is at least, more likely than not:
        `CAUTION` standard errors below what was seen."""
        return self._bounds[_CLASS[length] if length < CLASSES[-1] else -1]

    def note(self, length: int, hit: bool) -> None:
        """A guess behind a match of `length` tokens came true, or did not."""
        index = class_of(length)
        if self.tries[index] >= MEMORY:
            self.hits[index] *= 1 - 1 / MEMORY
            self.tries[index] -= 1
        self.hits[index] += hit
        self.tries[index] += 1
        self._bounds[index] = self._bound(index)

    def shares(self) -> list[float]:
        """The rate of every class."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True)]

    def _bound(self, index: int) -> float:
        tries = self.tries[index]
        rate = self.hits[index] / tries
        return rate - CAUTION * sqrt(max(rate * (1 - rate), 0.0) / tries)


class Source:
    """One place to copy from: a follower, and the record of its guesses."""

    def __init__(self, name: str, corpus: Corpus, rates: Rates) -> None:
        self.name = name
        self.follower = Follower(corpus)
        self.rates = rates

    @property
    def chance(self) -> float:
        """That the next guess is right; 0 where there is none."""
        length = self.follower.length
        return self.rates[length] if length else 0.0

    def read(self, text: list[int], scored: bool) -> None:
        """The text has gone on, to `text`; `scored` tells whether a model said the last token."""
        follower = self.follower
        length, at = follower.length, follower.at
        follower.step(text)
        if scored and length and (guess := follower.corpus.tokens[at]) != BREAK:
            self.rates.note(length, guess == text[-1])

    def draft(self, count: int) -> Iterator[tuple[int, float]]:
        """Up to `count` tokens, each with the chance that it and all before it are right."""
        chance, length = 1.0, self.follower.length
        for token in self.follower.chain(count):
            chance *= self.rates[length]
            length += 1
            yield token, chance

    def ahead(self, text: list[int], tokens: list[int]) -> Source:
        """This source once `text` has gone on with `tokens`."""
        other = Source(self.name, self.follower.corpus, self.rates)
        other.follower = self.follower.ahead(text, tokens)
        return other


def merged(sources: list[Source], count: int, least: float, forced: Seq[int] = ()) -> TokenTree:
    """What is `forced`, and behind it everything the sources propose, in one tree, the surest
    source first. `probabilities` holds each node's chance. Where sources part, the later one gets
    what the earlier one's doubt leaves."""
    tree = TokenTree.chain(forced, sources=["constraint"] * len(forced))
    chances = [1.0] * len(forced)
    last = len(forced) - 1
    for source in sorted(sources, key=lambda source: -source.chance):
        node, doubt = last, 1.0
        for token, chance in source.draft(count):
            child = tree.child(node, token)
            if child is None:
                taken = max((chances[c] for c in tree.children(node)), default=0.0)
                above = chances[node] if node != ROOT else 1.0
                doubt *= 1 - taken / above
                if chance * doubt < least:
                    break
                child = tree.add(token, node)
                chances.append(chance * doubt)
                assert tree.sources is not None
                tree.sources.append(source.name)
            node = child
    tree.probabilities = dict(enumerate(chances))
    return tree


def best_count(chances: Iterable[float], costs: Seq[float], others: int, drafting: float) -> int:
    """How many of the nodes with these falling chances to score: the count at which all running
    sequences together say most tokens per second. `costs[n]` is the pass with n drafts, `drafting`
    the seconds a draft takes."""
    said = others + 1.0
    best, best_rate = 0, LEAST_GAIN * said / costs[0]
    for count, (chance, cost) in enumerate(zip(chances, costs[1:], strict=False), 1):
        said += chance
        rate = said / (cost + drafting)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def best_part(tree: TokenTree, costs: Seq[float], others: int, drafting: float) -> list[int]:
    """The nodes of a tree worth scoring; `tree.probabilities` holds their chances."""
    chances = tree.probabilities
    order = sorted(chances, key=lambda node: (-chances[node], node))
    best = best_count([chances[node] for node in order], costs, others, drafting)
    return sorted(order[:best])


def part(tree: TokenTree, nodes: list[int]) -> TokenTree:
    """The tree of `nodes` alone; with every node its parent must be among them."""
    places = {ROOT: ROOT}
    kept = TokenTree(sources=[])
    for node in nodes:
        places[node] = kept.add(tree.tokens[node], places[tree.parents[node]])
        assert tree.sources is not None and kept.sources is not None
        kept.sources.append(tree.sources[node])
    return kept


class _Session:
    """What `auto` knows of one sequence."""

    def __init__(self, sequence: Sequence, decoder: Auto) -> None:
        self.sequence = sequence
        self.most = decoder.most
        self.own = Corpus()
        own, past = decoder.rates[sequence.policy.is_greedy]
        self.sources = [Source("copy", self.own, own)]
        if len(decoder.past):
            self.sources.append(Source("past", decoder.past, past))
        self.pace: Pace = sequence.pace or _Unmeasured()
        self.width = 1 + len(sequence.companion_prompts)
        self.constrained = constraint_state(sequence.policy) is not None
        self.drafting = 0.0
        self._costs: list[float] = []
        self._costs_for = (-1, -1)
        self.read(sequence.prompt, scored=False)
        self.read(sequence.tokens)

    def read(self, tokens: Seq[int], scored: bool = True) -> None:
        """The text has gone on with `tokens`."""
        text, append = self.own.tokens, self.own.append
        for token in tokens:
            append(token)
            for source in self.sources:
                source.read(text, scored)

    def draft(self) -> TokenTree:
        """The draft for the next pass, or an empty tree."""
        sequence = self.sequence
        most = min(self.most, sequence.remaining - 1)
        if most < 1 or sequence.length - sequence.context().length > 1:
            return _NOTHING  # at the end, or before the prompt has been scored
        others = self.pace.others()
        costs = self._passes(others)
        state = constraint_state(sequence.policy) if self.constrained else None
        forced = state.forced()[:most] if state is not None else []
        # Where two drafts as likely as the best first one would not pay, none will: growing a
        # tree only to find that out is what would make `auto` slower than plain decoding.
        best = 1.0 if forced else max([source.chance for source in self.sources])
        if (others + 1 + 2 * best) * costs[0] < (others + 1) * (costs[1] + self.drafting):
            return _NOTHING
        began = perf_counter()
        sources = self.sources
        if forced:
            sources = [source.ahead(self.own.tokens, forced) for source in sources]
        tree = self._best(forced, sources, costs[: most + 1], others)
        if state is not None and len(tree):
            tree = pruned([], tree, state)
        self.drafting += 0.1 * (perf_counter() - began - self.drafting)
        return tree

    def _best(
        self, forced: list[int], sources: list[Source], costs: list[float], others: int
    ) -> TokenTree:
        """`forced` and what is worth drafting behind it."""
        sources = [source for source in sources if source.chance >= LEAST_CHANCE]
        room = len(costs) - 1 - len(forced)
        if len(sources) < 2 or len({source.follower.guess for source in sources}) == 1:
            source = max(sources, key=lambda source: source.chance, default=None)
            drafted = list(source.draft(room)) if source is not None else []
            chances = [1.0] * len(forced) + [chance for _, chance in drafted]
            count = best_count(chances, costs, others, self.drafting)
            tokens = (forced + [token for token, _ in drafted])[:count]
            names = ["constraint"] * len(forced) + [source.name if source else ""] * len(drafted)
            return TokenTree.chain(tokens, sources=names[:count])
        tree = merged(sources, room, LEAST_CHANCE, forced)
        return part(tree, best_part(tree, costs, others, self.drafting))

    def _passes(self, others: int) -> list[float]:
        """What passes with 0 to `most` drafts cost. Looked up anew every 32 tokens only."""
        key = (others, self.sequence.length // 32)
        if key != self._costs_for:
            context, seconds, width = self.sequence.length, self.pace.seconds, self.width
            self._costs = [
                seconds(others + width * (1 + count), context) for count in range(self.most + 1)
            ]
            self._costs_for = key
        return self._costs

    def timed(self, rows: int, seconds: float) -> None:
        """A pass has come back."""
        if rows <= self.most + 1 and not self.pace.others():
            self.pace.note(rows * self.width, self.sequence.length, seconds)


class _Unmeasured:
    """A pace for sequences outside an engine."""

    def __init__(self) -> None:
        self._table = guessed()

    def seconds(self, rows: int, context: int) -> float:
        return self._table.seconds(rows, context)

    def others(self) -> int:
        return 0

    def note(self, rows: int, context: int, seconds: float) -> None:
        """Nothing is learned."""


@register(
    Card(
        "auto",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066), its objective",
        exactness="token-exact",
        summary="Chooses drafter, chain or tree and size before every pass; plain where that pays.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "lengths are chosen per request and pass from rates by match length, not from one"
            " moving average",
        ),
    )
)
class Auto(Decoder):
    """At most `most` drafts per pass. `memory` tokens of earlier answers are kept to copy from."""

    def __init__(self, most: int = 16, memory: int = 100_000) -> None:
        if most < 1 or memory < 0:
            raise InvalidRequestError("auto needs most >= 1 and memory >= 0")
        self.most = most
        self.memory = memory
        self.acceptance = TokenExact()
        self.clear()

    def clear(self) -> None:
        """Forget everything learned from earlier requests."""
        self.past = Corpus()
        self.rates = {greedy: (Rates(prior), Rates(prior)) for greedy, prior in PRIORS.items()}

    def prepare(self, sequence: Sequence) -> None:
        """Nothing is refused: where drafts cannot help there are none. Has the costs of passes
        measured, if nobody has yet, so that no pass waits for them."""
        if sequence.pace is not None:
            sequence.pace.seconds(1, 0)

    def decode(self, sequence: Sequence) -> Decoding:
        session = _Session(sequence, self)
        while not sequence.finished:
            began, known = perf_counter(), len(sequence.tokens)
            tree = session.draft()
            rows = sequence.length - sequence.context().length + len(tree)
            drafted = perf_counter() - began
            round = yield from verified(sequence, tree, self.acceptance, drafted)
            session.timed(rows, round.verify_seconds)
            session.read(sequence.tokens[known:])
        self._learn(sequence.tokens)

    def _learn(self, answer: list[int]) -> None:
        if len(self.past) + len(answer) >= self.memory:
            self.past = Corpus()
        if len(answer) < self.memory:
            for token in [*answer, BREAK]:
                self.past.append(token)

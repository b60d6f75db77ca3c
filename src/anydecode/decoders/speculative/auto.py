"""The default decoder: drafts where drafting pays, and is plain decoding where it does not.

It keeps score of what repetitions of the text (and of earlier answers) would have predicted, by how
long the match was, whether they were drafted or not. From these rates and the measured cost of a
pass it chooses, before every pass, the draft that says most tokens per second: none, a chain or a
tree. The objective is the goodput of Liu et al., SmartSpec, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from time import perf_counter

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.decoders.speculative.copies import BREAK, Corpus, Follower
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
    True: (0.24, 0.53, 0.65, 0.72, 0.82, 0.83, 0.9, 0.97),
    False: (0.17, 0.39, 0.48, 0.61, 0.73, 0.75, 0.9, 0.92),
}
PRIOR_WEIGHT = 8.0
#: Guesses older than about this many count no more.
MEMORY = 60.0

_CLASS = [max(i for i, low in enumerate(CLASSES) if low <= max(n, 1)) for n in range(CLASSES[-1])]


def class_of(length: int) -> int:
    """The index into `CLASSES` of a match length."""
    return _CLASS[length] if length < len(_CLASS) else len(CLASSES) - 1


class Rates:
    """How often guesses came true, by class of match length; old ones fade."""

    def __init__(self, prior: Iterable[float] = PRIORS[True], weight: float = PRIOR_WEIGHT) -> None:
        self.hits = [share * weight for share in prior]
        self.tries = [weight] * len(self.hits)

    def __getitem__(self, length: int) -> float:
        """The rate behind a match of `length` tokens."""
        index = class_of(length)
        return self.hits[index] / self.tries[index]

    def note(self, length: int, hit: bool) -> None:
        """A guess behind a match of `length` tokens came true, or did not."""
        index = class_of(length)
        if self.tries[index] >= MEMORY:
            self.hits[index] *= 1 - 1 / MEMORY
            self.tries[index] -= 1
        self.hits[index] += hit
        self.tries[index] += 1

    def shares(self) -> list[float]:
        """The rate of every class."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True)]


class Source:
    """One place to copy from: a follower, and the record of its guesses."""

    def __init__(self, name: str, corpus: Corpus, rates: Rates) -> None:
        self.name = name
        self.follower = Follower(corpus)
        self.rates = rates

    def read(self, token: int, tail: list[int], scored: bool) -> None:
        """The text goes on with `token`; `scored` tells whether a model said it."""
        follower = self.follower
        guess = follower.guess
        if scored and guess != BREAK:
            self.rates.note(follower.length, guess == token)
        follower.step(token, tail)

    def draft(self, count: int) -> Iterator[tuple[int, float]]:
        """Up to `count` tokens, each with the chance that it and all before it are right."""
        chance, length = 1.0, self.follower.length
        for token in self.follower.chain(count):
            chance *= self.rates[length]
            length += 1
            yield token, chance


def merged(sources: list[Source], count: int, least: float) -> TokenTree:
    """Everything the sources propose in one tree, the surest source first. `probabilities` holds
    each node's chance. Where sources part, the later one gets what the earlier one's doubt leaves.
    """
    tree = TokenTree(sources=[])
    chances: list[float] = []
    for source in sorted(sources, key=lambda source: -source.rates[source.follower.length]):
        node, doubt = ROOT, 1.0
        for token, chance in source.draft(count):
            child = tree.child(node, token)
            if child is None:
                taken = max((chances[c] for c in tree.children(node)), default=0.0)
                above = 1.0 if node == ROOT else chances[node]
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
        self.sources = [Source("copy", self.own, own), Source("past", decoder.past, past)]
        self.pace: Pace = sequence.pace or _Unmeasured()
        self.drafting = 0.0
        self._known: list[float] = []
        self._costs_for: tuple[int, int] | None = None
        self.read()

    def read(self) -> None:
        """Take in the tokens that came since the last call."""
        sequence, tokens = self.sequence, self.own.tokens
        prompt = len(sequence.prompt)
        known = len(tokens)
        news = sequence.tokens[known - prompt :] if known >= prompt else sequence.all_tokens
        for place, token in enumerate(news, known):
            self.own.append(token)
            tail = tokens[-8:]
            for source in self.sources:
                if len(source.follower.corpus):
                    source.read(token, tail, place >= prompt)

    def draft(self) -> TokenTree:
        """The draft for the next pass, or an empty tree."""
        sequence = self.sequence
        most = min(self.most, sequence.remaining - 1)
        sources = [source for source in self.sources if source.follower.length]
        if most < 1 or not sources or len(sequence.unscored()) > 1:
            return TokenTree()
        others = self.pace.others()
        costs = self._costs(others)[: most + 1]
        # Where two drafts as likely as the best first one would not pay, none will: growing a
        # tree only to find that out is what would make `auto` slower than plain decoding.
        best = max(source.rates[source.follower.length] for source in sources)
        if (others + 1 + 2 * best) / (costs[1] + self.drafting) < (others + 1) / costs[0]:
            return TokenTree()
        began = perf_counter()
        if len(sources) == 1:
            drafted = list(sources[0].draft(most))
            chances = [chance for _, chance in drafted]
            count = best_count(chances, costs, others, self.drafting)
            tokens = [token for token, _ in drafted[:count]]
            chosen = TokenTree.chain(tokens, sources=[sources[0].name] * count)
        else:
            tree = merged(sources, most, LEAST_CHANCE)
            chosen = part(tree, best_part(tree, costs, others, self.drafting))
        self.drafting += 0.1 * (perf_counter() - began - self.drafting)
        return chosen

    def _costs(self, others: int) -> list[float]:
        """Of passes with 0 to `most` drafts. Looked up anew every 32 tokens only."""
        key = (others, self.sequence.length // 32)
        if key != self._costs_for:
            context, pace = self.sequence.length, self.pace
            self._known = [pace.seconds(others + 1 + n, context) for n in range(self.most + 1)]
            self._costs_for = key
        return self._known

    def timed(self, rows: int, seconds: float) -> None:
        """A pass has come back."""
        if rows <= self.most + 1 and not self.pace.others():
            self.pace.note(rows, self.sequence.length, seconds)


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
            began = perf_counter()
            tree = session.draft()
            drafted = perf_counter()
            rows = len(sequence.unscored()) + len(tree)
            scores = yield sequence.verify(tree)
            verified = perf_counter()
            session.timed(rows, verified - drafted)
            verdict = self.acceptance.walk(tree, scores)
            sequence.record(
                tree,
                verdict.path,
                verdict.tokens,
                draft_seconds=drafted - began,
                verify_seconds=verified - drafted,
            )
            sequence.accept(verdict.path, verdict.tokens, scores)
            session.read()
        self._learn(sequence.tokens)

    def _learn(self, answer: list[int]) -> None:
        if len(self.past) + len(answer) >= self.memory:
            self.past = Corpus()
        if len(answer) < self.memory:
            for token in [*answer, BREAK]:
                self.past.append(token)

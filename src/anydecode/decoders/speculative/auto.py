"""The default decoder: drafts where drafting pays, and is plain decoding where it does not.

It keeps score of what repetitions of the text (and of earlier answers) would have predicted, by how
long the match was, and of what the model itself thought likeliest when it last scored the same
tokens, whether they were drafted or not. From these rates and the measured cost of a pass it
chooses, before every pass, the draft that says most tokens per second: none, a chain or a tree.
The cost is that of the pass with the rows of every running sequence, so that drafts must pay for
what they take from the neighbours. Between drafts it decodes as `following` does, several tokens
before a draft is looked for again; where no draft could pay, none is looked for. The objective is
the goodput of Liu et al., SmartSpec, arXiv:2406.14066. What a constraint forces is drafted first,
since it is sure to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt
from time import perf_counter

from anydecode.catalogue import Card, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.decoders.speculative.copies import SEPARATOR, MatchCursor, TokenHistory
from anydecode.decoders.speculative.core import SpeculationRound, verified
from anydecode.decoders.speculative.successors import WIDTH, Successors
from anydecode.errors import InvalidRequestError
from anydecode.scoring.cost import CostModel, default_table
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: A draft must promise this much more than plain decoding.
LEAST_GAIN = 1.02
#: Branches less likely than this are not grown.
LEAST_CHANCE = 0.02
#: Match lengths are told apart up to here.
CLASSES = (1, 2, 3, 4, 6, 9, 14, 20, 32, 64)
#: How often a guess behind a match of each class is right, in greedy (True) and in sampled texts of
#: a small model, and how many guesses that knowledge is worth.
PRIORS = {
    True: (0.25, 0.53, 0.65, 0.72, 0.79, 0.85, 0.91, 0.95, 0.98, 0.995),
    False: (0.18, 0.4, 0.55, 0.57, 0.68, 0.76, 0.85, 0.92, 0.97, 0.99),
}
#: The same for the successors the model thought likeliest: of a pair of tokens, then of one.
SUCCESSOR_PRIORS = {
    True: (0.6, 0.08, 0.4, 0.09),
    False: (0.45, 0.12, 0.18, 0.1),
}
#: Passes of fewer seconds per sequence are too short for that: to look for the likeliest in the
#: logits of one sequence takes some 50 microseconds, and saves one pass in thirty.
LEAST_PASS = 0.008
#: How often a draft is worth scoring, before anything is known, in greedy and in sampled texts, and
#: over how many tokens that is learned. As many tokens as lie between two drafts, on average, are
#: said at a time without looking for another, up to `MOST_BLIND`.
OFTEN = {True: 0.25, False: 0.1}
RECENT = 16
MOST_BLIND = 4
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
    """How often guesses came true, by kind; old ones fade."""

    def __init__(self, prior: Iterable[float], weight: float = PRIOR_WEIGHT) -> None:
        self.hits = [share * weight for share in prior]
        self.tries = [weight] * len(self.hits)
        self._bounds = [self._bound(kind) for kind in range(len(self.hits))]

    def __getitem__(self, kind: int) -> float:
        """What the rate of a kind is at least, more likely than not: `CAUTION` standard errors
        below what was seen."""
        return self._bounds[kind]

    def note(self, kind: int, hit: bool) -> None:
        """A guess came true, or did not."""
        if self.tries[kind] >= MEMORY:
            self.hits[kind] *= 1 - 1 / MEMORY
            self.tries[kind] -= 1
        self.hits[kind] += hit
        self.tries[kind] += 1
        self._bounds[kind] = self._bound(kind)

    def shares(self) -> list[float]:
        """The rate of every kind."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True)]

    def _bound(self, kind: int) -> float:
        tries = self.tries[kind]
        rate = self.hits[kind] / tries
        return rate - CAUTION * sqrt(max(rate * (1 - rate), 0.0) / tries)


class Source:
    """One place to copy from: a follower, and the record of its guesses."""

    def __init__(self, name: str, corpus: TokenHistory, rates: Rates) -> None:
        self.name = name
        self.follower = MatchCursor(corpus)
        self.rates = rates

    def chance(self, ahead: int = 0) -> float:
        """That the guess `ahead` tokens on is right if all before it are; 0 without a match."""
        length = self.follower.length
        return self.rates[class_of(length + ahead)] if length else 0.0

    def read(self, text: list[int], scored: bool) -> None:
        """The text has gone on, to `text`; `scored` tells whether a model said the last token."""
        follower = self.follower
        length, at = follower.length, follower.at
        follower.step(text)
        if scored and length and (guess := follower.corpus.tokens[at]) != SEPARATOR:
            self.rates.note(class_of(length), guess == text[-1])

    def ahead(self, text: list[int], tokens: list[int]) -> Source:
        """This source once `text` has gone on with `tokens`."""
        other = Source(self.name, self.follower.corpus, self.rates)
        other.follower = self.follower.ahead(text, tokens)
        return other


class Guesser:
    """Guesses what the model will say, by what it thought likeliest when it last scored the same
    tokens."""

    def __init__(self, known: Successors, rates: Rates) -> None:
        self.known = known
        self.rates = rates

    def guesses(self, before: int, last: int) -> list[tuple[int, float]]:
        """Tokens that may follow, the likeliest first, each with its chance."""
        first, found = self.known.find(before, last)
        return [(token, self.rates[first + rank]) for rank, token in enumerate(found)]

    def read(self, before: int, last: int, token: int) -> None:
        """The model said `token` behind `last`."""
        for kind, hit in self.known.notes(before, last, token):
            self.rates.note(kind, hit)


@dataclass
class Growth:
    """Nodes of a tree, the likeliest first: a parent stands before its children, and any first few
    of them are a tree of their own."""

    tokens: list[int]
    parents: list[int]
    sources: list[str]
    chances: list[float]

    def add(self, token: int, parent: int, source: str, chance: float) -> int:
        """Append a node; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.chances.append(chance)
        return len(self.tokens) - 1

    def first(self, count: int) -> TokenTree:
        """The tree of the `count` likeliest."""
        return TokenTree(self.tokens[:count], self.parents[:count], sources=self.sources[:count])


def grown(
    text: Seq[int],
    sources: Seq[Source],
    guesser: Guesser,
    count: int,
    least: float,
    forced: Seq[int] = (),
) -> Growth:
    """What is `forced`, and behind it up to `count` nodes that sources and guesser propose, the
    likeliest first, none below `least`. Where proposals part, the less sure one gets what the surer
    one's doubt leaves."""
    growth = Growth([], [], [], [])
    for token in forced:
        growth.add(token, len(growth.tokens) - 1, "constraint", 1.0)
    if len(sources) == 1 and not guesser.known:  # nothing to weigh it against
        _follow(growth, sources[0], count, least)
        return growth
    chains = [source.follower.chain(count) for source in sources]
    queue: list[tuple[float, int, int, int, int, str, list[int]]] = []
    order = 0

    def propose(
        node: int, chance: float, before: int, last: int, depth: int, kept: list[int]
    ) -> None:
        nonlocal order
        offers: list[tuple[str, list[tuple[int, float]]]] = [
            (sources[i].name, [(chains[i][depth], sources[i].chance(depth))])
            for i in kept
            if depth < len(chains[i])
        ]
        guesses = guesser.guesses(before, last)
        if guesses:
            offers.append(("recycled", guesses))
        left, seen = 1.0, set()
        for name, options in sorted(offers, key=lambda offer: -offer[1][0][1]):
            doubt = left
            for token, share in options:
                if token in seen:
                    continue
                seen.add(token)
                left -= share * doubt
                if chance * share * doubt >= least:
                    order += 1
                    entry = (-chance * share * doubt, order, node, token, depth, name, kept)
                    heappush(queue, entry)

    tail = [*text[-2:], *forced]
    before, last = (tail[-2], tail[-1]) if len(tail) > 1 else (SEPARATOR, tail[-1])
    propose(len(forced) - 1, 1.0, before, last, 0, list(range(len(sources))))
    parents = {len(forced) - 1: last}
    while queue and len(growth.tokens) < len(forced) + count:
        chance, _, parent, token, depth, name, kept = heappop(queue)
        node = growth.add(token, parent, name, -chance)
        parents[node] = token
        kept = [i for i in kept if depth < len(chains[i]) and chains[i][depth] == token]
        propose(node, -chance, parents[parent], token, depth + 1, kept)
    return growth


def _follow(growth: Growth, source: Source, count: int, least: float) -> None:
    """Lengthen `growth` by what one source says, up to `count` nodes, none below `least`."""
    chance = 1.0
    for depth, token in enumerate(source.follower.chain(count)):
        chance *= source.chance(depth)
        if chance < least:
            return
        growth.add(token, len(growth.tokens) - 1, source.name, chance)


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


def needed(costs: Seq[float], others: int) -> float:
    """How likely the likeliest node of a draft must be for any number of nodes to pay, since none
    of the others is likelier; more than 1 where no draft pays. `costs` as for `best_count`."""
    said = others + 1.0
    return min(
        (LEAST_GAIN * said * cost / costs[0] - said) / count
        for count, cost in enumerate(costs[1:], 1)
    )


class _Session:
    """What `auto` knows of one sequence."""

    def __init__(self, sequence: Sequence, decoder: Auto) -> None:
        self.sequence = sequence
        self.most = decoder.most
        self.own = TokenHistory()
        own, past, guessed = decoder.rates[sequence.sampler.is_greedy]
        self.sources = [Source("copy", self.own, own)]
        self.guesser = Guesser(decoder.successors, guessed)
        if len(decoder.past):
            self.sources.append(Source("past", decoder.past, past))
        self.cost_model: CostModel = sequence.cost_model or _Unmeasured()
        self.width = 1 + len(sequence.companion_prompts)
        self.constrained = constraint_state(sequence.sampler) is not None
        self.drafting = 0.0
        self._decoder = decoder
        self._often = OFTEN[sequence.sampler.is_greedy]
        self._blind = 1
        self._unseen = sequence.end_tokens is not None
        self._costs = [0.0]
        self._pass = 0.0  # seconds of a pass without a draft
        self._share = 0.0  # the same per sequence that takes part in it
        self._needed = 0.0  # no draft pays whose likeliest node is less likely
        self._costs_for = (-1, -1)
        self._read(sequence.prompt, scored=False)

    def _catch_up(self) -> None:
        """Read what the text has gone on with since the last call."""
        known = len(self.own) - len(self.sequence.prompt)
        self._read(self.sequence.tokens[known:])

    def _read(self, tokens: Seq[int], scored: bool = True) -> None:
        text, append = self.own.tokens, self.own.append
        for token in tokens:
            if scored and self.guesser.known and len(text) > 1:
                self.guesser.read(text[-2], text[-1], token)
            append(token)
            for source in self.sources:
                source.read(text, scored)

    def draft(self) -> TokenTree:
        """The draft for the next pass, or an empty tree."""
        sequence = self.sequence
        others = self.cost_model.num_others()
        costs = self._passes(others)
        most = min(self.most, sequence.remaining - 1)
        if self._needed > 1.0 or most < 1 or sequence.length - sequence.context().length > 1:
            return _NOTHING  # no draft can pay; at the end; or before the prompt has been scored
        self._catch_up()
        state = constraint_state(sequence.sampler) if self.constrained else None
        forced = state.forced()[:most] if state is not None else []
        # Growing a tree only to find that it does not pay is what would make `auto` slower than
        # plain decoding.
        if not forced and self._surest() < self._needed:
            return _NOTHING
        sources = self.sources
        if forced:
            sources = [source.ahead(self.own.tokens, forced) for source in sources]
        tree = self._best(forced, sources, costs[: most + 1], others)
        if state is not None and len(tree):
            tree = pruned([], tree, state)
        return tree

    def blind(self, tree: TokenTree) -> int:
        """How many tokens to say before looking for a draft again, given the one just found; 0: the
        next pass has to be seen. An answer's first token comes alone."""
        self._often += min(1.0, self._blind / RECENT) * (bool(len(tree)) - self._often)
        self._blind = 1
        if len(tree) or not self._may_be_blind():
            return 0
        if self.sequence.tokens:
            self._blind = int(1 / max(self._often, 1 / MOST_BLIND))
        return self._blind

    def _may_be_blind(self) -> bool:
        """Whether tokens may be said without looking: each need not be seen, and passes are so
        short that nothing is learned from their logits."""
        return self._unseen and self._share < LEAST_PASS

    def blindly(self, count: int) -> Decoding:
        """Say `count` tokens without looking, at once where the kernels can go on by themselves:
        for a sequence that is alone. In company each is emitted as it comes."""
        sequence, decoder = self.sequence, self._decoder
        alone, start = not self.cost_model.num_others(), len(sequence.tokens)
        while not sequence.finished and (left := start + count - len(sequence.tokens)) > 0:
            began = perf_counter()
            following = sequence.multi_step(left if alone else 1)
            tokens = yield following
            each = (perf_counter() - began) / len(tokens)
            if alone and len(tokens) > 1:
                share = min(max(each / self._pass, 0.5), 1.0)
                decoder.blind_cost += 0.1 * (share - decoder.blind_cost)
            if sequence.trace is not None:
                for position, token in enumerate(tokens, sequence.length):
                    facts = {"position": position, "draft_seconds": 0.0, "verify_seconds": each}
                    sequence.record(_NOTHING, [], [token], **facts)
            sequence.emit(tokens, following.state)
        self._blind = len(sequence.tokens) - start

    def _surest(self) -> float:
        """The chance of the likeliest next token."""
        chances = [source.chance() for source in self.sources]
        text = self.own.tokens
        if self.guesser.known and len(text) > 1:
            chances += [chance for _, chance in self.guesser.guesses(text[-2], text[-1])[:1]]
        return max(chances)

    def observe(self, round: SpeculationRound, root: int) -> None:
        """Every scored node teaches what follows it, accepted or not. The draft hung on the token
        at `root` of the text."""
        tree, text = round.tree, self.own.tokens
        if self._share < LEAST_PASS or root < 1 or len(round.scores) != len(tree) + 1:
            return
        self._catch_up()
        learn = self.guesser.known.learn
        best = round.scores.top(WIDTH)[0].tolist()
        learn(text[root - 1], text[root], best[0])
        for token, parent, likeliest in zip(tree.tokens, tree.parents, best[1:], strict=True):
            learn(text[root] if parent == ROOT else tree.tokens[parent], token, likeliest)

    def _best(
        self, forced: list[int], sources: list[Source], costs: list[float], others: int
    ) -> TokenTree:
        """`forced` and what is worth drafting behind it."""
        sources = [source for source in sources if source.chance() >= LEAST_CHANCE]
        room = len(costs) - 1 - len(forced)
        # A draft less likely than the cheapest row's share of a pass can pay for no row.
        said = (others + 1) / costs[0]
        least = min((cost - costs[0]) / n for n, cost in enumerate(costs) if n) * said
        least = max(least, LEAST_CHANCE)
        growth = grown(self.own.tokens, sources, self.guesser, room, least, forced)
        return growth.first(best_count(growth.chances, costs, others, self.drafting))

    def _passes(self, others: int) -> list[float]:
        """What passes with 0 to `most` drafts cost, the rows of all others included. Looked up anew
        when others come or go, and every 64 tokens."""
        key = (others, self.sequence.length // 64)
        if key != self._costs_for:
            context, seconds, width = self.sequence.length, self.cost_model.seconds, self.width
            self._costs = [
                seconds(others + width * (1 + count), context) for count in range(self.most + 1)
            ]
            self._pass = self._costs[0]
            self._share = self._pass / (others + 1)
            if self._may_be_blind() and not others:  # that is what a draft has to be better than
                self._costs[0] *= self._decoder.blind_cost
            self._needed = needed(self._costs, others)
            self._costs_for = key
        return self._costs

    def took(self, seconds: float) -> None:
        """What drafting and learning from the draft have taken in one round."""
        self.drafting += 0.1 * (seconds - self.drafting)


class _Unmeasured:
    """A cost model for sequences outside an engine."""

    def __init__(self) -> None:
        self._table = default_table()

    def seconds(self, rows: int, context: int) -> float:
        return self._table.seconds(rows, context)

    def num_others(self) -> int:
        return 0


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

    def __init__(self, most: int = 32, memory: int = 100_000) -> None:
        if most < 1 or memory < 0:
            raise InvalidRequestError("auto needs most >= 1 and memory >= 0")
        self.most = most
        self.memory = memory
        self.acceptance = TokenExact()
        self.blind_cost = 1.0  # of a token said blindly, in passes over one row
        self.clear()

    def clear(self) -> None:
        """Forget everything learned from earlier requests."""
        self.past = TokenHistory()
        self.successors = Successors()
        self.rates = {
            greedy: (Rates(prior), Rates(prior), Rates(SUCCESSOR_PRIORS[greedy]))
            for greedy, prior in PRIORS.items()
        }

    def decode(self, sequence: Sequence) -> Decoding:
        session = _Session(sequence, self)
        while not sequence.finished:
            began, root = perf_counter(), sequence.length - 1
            tree = session.draft()
            if blind := session.blind(tree):
                yield from session.blindly(blind)
                continue
            drafted = perf_counter() - began
            round = yield from verified(sequence, tree, self.acceptance, drafted)
            began = perf_counter()
            session.observe(round, root)
            if len(tree):
                session.took(drafted + perf_counter() - began)
        self._learn(sequence.tokens)

    def _learn(self, answer: list[int]) -> None:
        if len(self.past) + len(answer) >= self.memory:
            self.past = TokenHistory()
        if len(self.successors) >= self.memory:
            self.successors = Successors()
        if len(answer) < self.memory:
            for token in [*answer, SEPARATOR]:
                self.past.append(token)

"""The sources of `auto`'s drafts, with their acceptance rates: copies from texts, the model's most
probable tokens of earlier passes, and a draft model."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import sqrt
from time import perf_counter
from typing import Any

import numpy as np

from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.decoders.speculative.match_cursor import MatchCursor
from anydecode.decoders.speculative.successors import Successors
from anydecode.kernels.interface import NUM_BINS, BurstDrafter, BurstDrafts, CopyMatch, CopyText
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT

#: Lower bounds of the match-length classes.
MATCH_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 20, 32, 64)
#: Prior acceptance rate of a copied token by match-length class, in greedy (True) and in sampled
#: texts of the default model, from `anydecode bench draft-priors` (classes with fewer than 30
#: drafts take the rate before). `PRIOR_WEIGHT` is the number of observations that the priors count
#: for.
PRIORS = {
    True: (0.17, 0.49, 0.57, 0.73, 0.81, 0.89, 0.93, 0.96, 0.99, 0.99),
    False: (0.15, 0.4, 0.45, 0.6, 0.72, 0.84, 0.85, 0.85, 0.85, 0.85),
}
#: Prior acceptance rates of the model's most probable successors: two of a token pair, then two of
#: a single token; from the same command.
SUCCESSOR_PRIORS = {
    True: (0.55, 0.08, 0.16, 0.08),
    False: (0.32, 0.1, 0.13, 0.06),
}
#: What a round of the default model's drafter brings on the mean, in greedy and in sampled texts:
#: the drafts that are verified, those that are accepted, and the time of drafting and of one draft
#: in passes over one row. `anydecode bench draft-priors` prints such means.
ROUND_PRIORS = {True: (1.95, 0.98, 0.12, 0.07), False: (1.16, 0.56, 0.1, 0.07)}
#: What drafts within bursts in company bring on texts of the default model, greedy and sampled: the
#: share of the passes in which a sequence has a useful draft, its tokens and the accepted ones;
#: from the same command.
SHARED_PRIORS = {True: (0.18, 1.85, 1.13), False: (0.07, 1.17, 0.34)}
PRIOR_WEIGHT = 8.0
#: Number of recent observations that a rate is averaged over. `anydecode bench draft-priors` prints
#: how well rates of several such numbers predict.
RATE_MEMORY = 60.0
#: Depths of a draft model's chain whose tokens have acceptance rates of their own; greater ones
#: have those of the last one.
NUM_DEPTHS = 4
#: Number of tokens after which a draft model drafts again where it has saved no time, which
#: doubles each time, and number of such drafts in a burst.
MODEL_INTERVAL, NUM_TRIALS = 64, 4
#: If a drafter has read more tokens before a draft, the time of the draft says little of others.
MAX_UNREAD = 16
#: The share of the time since its last draft that a draft model may take for reading a text in
#: which it has not paid so far.
TRIAL_SHARE = 0.02
#: Maximum number of tokens of a burst in which the backend drafts.
MAX_BURST_TOKENS = 64
#: Least weight of a round in the averages over all sequences, and over those of one sequence, and
#: the number of rounds that the first guess, or what other sequences have brought, counts for.
SHARED_RATE, OWN_RATE = 0.01, 0.08
PRIOR_ROUNDS = 4
#: Weight of a reading in the average of their durations.
READ_RATE = 0.2
#: Weights of a burst in company in the averages of what drafts bring in them, and in that of the
#: time of preparing them, if it took longer, which may include other work of the machine, or less.
BURST_RATE, SLOWER_RATE, FASTER_RATE = 0.02, 0.1, 0.5
#: Number of standard errors subtracted from a rate to get its lower bound: a plain choice. By the
#: normal approximation, the rate is above it with a probability of 0.69.
NUM_STANDARD_ERRORS = 0.5


#: The class of each match length; longer matches have the last one.
_CLASSES = [
    max(i for i, low in enumerate(MATCH_LENGTHS) if low <= max(n, 1))
    for n in range(MATCH_LENGTHS[-1] + 1)
]
_CLASS_INDEX = np.array(_CLASSES)


def class_of(length: int) -> int:
    """The index into `MATCH_LENGTHS` of a match length."""
    return _CLASSES[min(length, MATCH_LENGTHS[-1])]


def num_accepted(draft: Seq[int], tokens: Seq[int]) -> int:
    """The number of first tokens of a draft that equal those of the text after it."""
    pairs = zip(draft, tokens, strict=False)
    return next(
        (i for i, (one, other) in enumerate(pairs) if one != other), min(len(draft), len(tokens))
    )


def burst_path(draft: Seq[int], sibling: int | None, tokens: Seq[int]) -> list[int]:
    """The accepted nodes of a draft in a burst: those of a chain, after which the sibling of the
    first one is numbered.

    Args:
        draft: The chain.
        sibling: The sibling; None: there is none.
        tokens: The tokens of the text after it.
    """
    count = num_accepted(draft, tokens)
    if not count and sibling is not None and tokens and tokens[0] == sibling:
        return [len(draft)]
    return list(range(count))


class AcceptanceRates:
    """Acceptance rates by kind of draft; old observations decay.

    Args:
        prior: The first rate of each kind.
        weight: The number of observations that these count for.
        memory: The number of recent observations that a rate is averaged over.

    Attributes:
        bounds: The lower bound of each kind's rate (`__getitem__`).
    """

    def __init__(
        self,
        prior: Iterable[float],
        weight: float = PRIOR_WEIGHT,
        memory: float = RATE_MEMORY,
    ) -> None:
        self.memory = memory
        self.hits = [rate * weight for rate in prior]
        self.tries = [weight] * len(self.hits)
        self.bounds = [self._bound(kind) for kind in range(len(self.hits))]

    def __getitem__(self, kind: int) -> float:
        """The lower bound of a kind's rate: the observed rate less `NUM_STANDARD_ERRORS` standard
        errors."""
        return self.bounds[kind]

    def record(self, kind: int, hit: bool) -> None:
        """Record whether a draft of this kind was right."""
        if self.tries[kind] >= self.memory:
            self.hits[kind] *= 1 - 1 / self.memory
            self.tries[kind] -= 1
        self.hits[kind] += hit
        self.tries[kind] += 1
        self.bounds[kind] = self._bound(kind)

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

    def as_text(self, room: int = 0) -> CopyText:
        """The history, the match in it and the acceptance probabilities, as backends copy them;
        with `room` for so many tokens."""
        cursor, history = self.cursor, self.cursor.history
        chances = np.array(self.rates.bounds)[_CLASS_INDEX]
        return CopyText(history.array(room), len(history), cursor.position, cursor.length, chances)

    def read(self, text: list[int], scored: bool) -> None:
        """Move on to `text`. With `scored`, its last token came from the model and counts for the
        rates."""
        length = self.cursor.length
        is_hit = self.cursor.step(text)
        if scored and is_hit is not None:
            self.rates.record(class_of(length), is_hit)

    def follow(self, found: CopyMatch) -> None:
        """Move on to where a backend has followed the text in this history."""
        self.cursor.position, self.cursor.length = found.position, found.match
        for outcome in found.outcomes:
            self.rates.record(class_of(outcome // 2), outcome % 2 == 1)

    def restart(self) -> None:
        """Drop the match: tokens have not been read, and count for no rate."""
        self.cursor.length = 0

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
class DraftRecord:
    """What rounds with drafts of a model have brought, as averages over recent rounds.

    Attributes:
        rows: Drafted tokens that were verified.
        accepted: Of these, the accepted ones.
        seconds: Time that drafting took.
        seconds_per_draft: The same per drafted token.
    """

    rows: float
    accepted: float
    seconds: float
    seconds_per_draft: float

    def record(self, rate: float, rows: int, accepted: int, seconds: float, drafts: int) -> None:
        """Add a round; earlier ones keep `1 - rate` of their weight."""
        self.rows += rate * (rows - self.rows)
        self.accepted += rate * (accepted - self.accepted)
        self.seconds += rate * (seconds - self.seconds)
        self.seconds_per_draft += rate * (seconds / max(1, drafts) - self.seconds_per_draft)


@dataclass
class SharedDrafts:
    """What drafts within bursts in company bring and take, as averages over those of all sequences
    that asked for some.

    Attributes:
        share: The share of the passes in which a sequence has a useful draft.
        drafts: The tokens of such a draft.
        accepted: Of these, the accepted ones.
        seconds: What preparing the drafts of a burst takes; 0 before this was measured.
    """

    share: float
    drafts: float
    accepted: float
    seconds: float = 0.0

    def record(self, rows: Seq[int], accepted: int, seconds: float) -> None:
        """Add a burst of a sequence.

        Args:
            rows: Its rows in each pass.
            accepted: The number of accepted drafts.
            seconds: The time of preparing the drafts.
        """
        num_drafted = sum(count > 1 for count in rows)
        self.share += BURST_RATE * (num_drafted / len(rows) - self.share)
        if num_drafted:
            self.drafts += BURST_RATE * ((sum(rows) - len(rows)) / num_drafted - self.drafts)
            self.accepted += BURST_RATE * (accepted / num_drafted - self.accepted)
        rate = SLOWER_RATE if seconds > self.seconds > 0 else FASTER_RATE
        self.seconds += rate * (seconds - self.seconds)

    def pays(self, num_drafted: float, token_seconds: float, row_seconds: float) -> bool:
        """Whether drafts are expected to save more time in a burst than preparing them takes.

        Args:
            num_drafted: The number of passes that are expected to have a useful draft.
            token_seconds: What an accepted token saves.
            row_seconds: What a drafted token takes.
        """
        saved = self.accepted * token_seconds - self.drafts * row_seconds
        return num_drafted * saved > self.seconds


class LearnedDrafts:
    """What `auto` knows of a draft model, for all sequences: how often its drafts are accepted, by
    depth and by the probability that it gives them, and what they bring; and of the siblings of
    their first tokens by twice that probability."""

    def __init__(self) -> None:
        middles = [(kind + 0.5) / NUM_BINS for kind in range(NUM_BINS)]
        self.rates = AcceptanceRates(NUM_DEPTHS * middles)
        self.sibling_rates = AcceptanceRates(middle / 2 for middle in middles)
        self.record: DraftRecord | None = None  # None before the first round
        self.num_rounds = 0  # in `record`
        self.num_undrafted = 0  # tokens of all sequences since the last draft
        self.read_seconds: float | None = None  # that the draft model takes per token that it reads

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Record how long the draft model took to read so many tokens."""
        measured = max(0.0, seconds) / num_tokens
        if self.read_seconds is None:
            self.read_seconds = measured
        self.read_seconds += READ_RATE * (measured - self.read_seconds)

    @staticmethod
    def kind(depth: int, probability: float) -> int:
        """The class, in `rates`, of a token at `depth` with this probability."""
        bin = min(int(probability * NUM_BINS), NUM_BINS - 1)
        return min(depth, NUM_DEPTHS - 1) * NUM_BINS + bin

    def chances(self) -> np.ndarray:
        """The acceptance rates, float64 `[NUM_DEPTHS, NUM_BINS]`."""
        return np.array([self.rates[kind] for kind in range(NUM_DEPTHS * NUM_BINS)]).reshape(
            NUM_DEPTHS, NUM_BINS
        )

    def sibling_chances(self) -> np.ndarray:
        """The acceptance rates of siblings, float64 `[NUM_BINS]`."""
        return np.array(self.sibling_rates.bounds)

    def record_sibling(self, probability: float, is_right: bool) -> None:
        """Record whether a sibling of a first token was right."""
        self.sibling_rates.record(self.kind(0, 2 * probability), is_right)

    def mean_chances(self) -> np.ndarray:
        """The fractions of the drafts at each depth that are accepted, of those whose predecessors
        were, float64 `[NUM_DEPTHS]`."""
        counts = np.array([self.rates.hits, self.rates.tries]).reshape(2, NUM_DEPTHS, NUM_BINS)
        hits, tries = counts.sum(-1)
        return hits / tries

    def mean_rate(self) -> float:
        """The fraction of the drafts that is accepted, of those whose predecessors were."""
        return sum(self.rates.hits) / sum(self.rates.tries)


class ModelSource:
    """Drafts chains with the runner "draft" for one sequence, as long as its confidence lets them
    save time.

    Args:
        sequence: The sequence.
        learned: What is known of the draft model.
    """

    name = "model"

    def __init__(self, sequence: Sequence, learned: LearnedDrafts) -> None:
        self.sequence = sequence
        self.learned = learned
        self.record = None if learned.record is None else replace(learned.record)
        self.num_rounds = 0  # of this sequence
        self.num_undrafted = 0  # tokens since the last draft
        self._interval = MODEL_INTERVAL
        self._drafted: list[int] = []
        self._kinds: list[int] = []
        self._seconds = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it has not drafted for so long that it is to try again."""
        return self.num_undrafted >= self._interval

    def skip(self, num_tokens: int) -> None:
        """Count tokens that were generated without its drafts."""
        self.num_undrafted += num_tokens
        self.learned.num_undrafted += num_tokens

    def pause(self, is_paused: bool) -> None:
        """Let the target's passes leave out the states that the draft model reads, or not."""
        if DRAFT in self.sequence.draft_states:
            self.sequence.draft_states[DRAFT].is_paused = is_paused

    def expected(self, pass_seconds: float) -> DraftRecord:
        """What the next round is expected to bring; before the first one, what rounds of another
        drafter brought (`ROUND_PRIORS`).

        Args:
            pass_seconds: The cost of a pass without drafts.
        """
        if self.record is None:
            rows, accepted, drafting, per_draft = ROUND_PRIORS[self.sequence.sampler.is_greedy]
            drafting, per_draft = drafting * pass_seconds, per_draft * pass_seconds
            self.record = DraftRecord(rows, accepted, drafting, per_draft)
        return self.record

    def reading_seconds(self, pass_seconds: float) -> float:
        """The time it is expected to take for reading the text that it has not read, before it can
        draft. Before this was measured, a token is taken to be read as slowly as one is drafted.

        Args:
            pass_seconds: As for `expected`.
        """
        num_unread = self._num_unread()
        if num_unread <= MAX_UNREAD:  # that of every round, included in what it brings
            return 0.0
        per_token = self.learned.read_seconds
        if per_token is None:
            per_token = self.expected(pass_seconds).seconds_per_draft
        return num_unread * per_token

    def _num_unread(self) -> int:
        """The tokens that it reads before it drafts: in bursts, no more than the last ones."""
        sequence, first = self.sequence, self.sequence.kv_cache(DRAFT).length
        num_unread = max(0, sequence.length - first)
        if not self.drafts_in_bursts:
            return num_unread
        if not sequence.tokens:  # the next pass computes the states of the prompt
            return min(num_unread, MAX_BURST_TOKENS)
        return sequence.draft_states[DRAFT].num_readable(first, num_unread, MAX_BURST_TOKENS)

    def draft(
        self, size: int, min_probability: float
    ) -> Generator[DecoderAction, Any, list[tuple[int, float]]]:
        """Draft up to `size` tokens; returns them with their acceptance probabilities.

        Args:
            size: Maximum number of tokens.
            min_probability: The probability of a path below which it is not continued.
        """
        start, num_unread = perf_counter(), self._num_unread()
        self.sequence.align(DRAFT)
        probabilities: list[float] = []
        self._drafted = yield from draft_chain(
            self.sequence, [], size, probabilities=probabilities, min_probability=min_probability
        )
        self._seconds = perf_counter() - start
        if num_unread > MAX_UNREAD and self.record is not None:
            drafting = len(self._drafted) * self.record.seconds_per_draft
            self.learned.record_reading(num_unread, self._seconds - drafting)
            self._seconds = min(self._seconds, drafting)
        self._kinds = [self.learned.kind(*given) for given in enumerate(probabilities)]
        rates = [self.learned.rates[kind] for kind in self._kinds]
        return list(zip(self._drafted, rates, strict=True))

    @property
    def drafts_in_bursts(self) -> bool:
        """Whether the draft model drafts within multi-step bursts."""
        states = self.sequence.draft_states.get(DRAFT)
        return states is not None and states.chains is not None

    def in_burst(
        self, rate: float, pass_seconds: float, size: int, max_unread: int
    ) -> BurstDrafter:
        """The draft model as it drafts in the next burst.

        Args:
            rate: The expected tokens per second of a step with its draft.
            pass_seconds: As for `expected`.
            size: Maximum number of tokens of a draft.
            max_unread: Maximum number of tokens that it reads before it drafts; earlier ones that
                it has not read are left out, from which it would learn little.
        """
        sequence = self.sequence
        sequence.align(DRAFT)
        kv_cache, states = sequence.kv_cache(DRAFT), sequence.draft_states[DRAFT]
        tokens, known = states.unread(kv_cache, sequence.unscored(DRAFT), max_unread)
        return BurstDrafter(
            states.chains,
            states.layers,
            kv_cache.pool.cache,
            kv_cache.table,
            kv_cache.length,
            tokens,
            known,
            self.learned.chances(),
            self.learned.mean_chances(),
            rate,
            self.expected(pass_seconds).seconds_per_draft,
            size,
            NUM_TRIALS * self.is_due,
            self.learned.sibling_chances(),
        )

    def observe_burst(
        self, drafter: BurstDrafter, drafts: BurstDrafts, tokens_of_steps: Seq[Seq[int]]
    ) -> None:
        """Record the passes of a burst, and the tokens of each. Of a last pass without a token
        after the accepted ones, it is unknown how many would have been accepted: it counts for
        none of what rounds bring."""
        self._interval = 2 * self._interval if drafter.num_due else MODEL_INTERVAL
        for index, (draft, tokens) in enumerate(zip(drafts.drafts, tokens_of_steps, strict=True)):
            is_own = drafts.sources[index] == len(drafts.texts)
            # Where a copy was taken instead, drafting took its time, too.
            if not is_own and not drafter.num_drafted[index]:
                self.skip(len(tokens))
                continue
            self.num_undrafted = self.learned.num_undrafted = 0
            count = num_accepted(draft, tokens)
            probabilities = drafts.probabilities[index] if is_own else []
            for depth, probability in enumerate(probabilities[: min(count + 1, len(tokens))]):
                self.learned.rates.record(self.learned.kind(depth, probability), depth < count)
            sibling = drafter.siblings[index]
            if is_own and tokens and sibling >= 0:
                probability = drafter.sibling_probabilities[index]
                self.learned.record_sibling(probability, sibling == tokens[0])
            path = burst_path(draft, drafts.siblings[index], tokens)
            if len(path) == len(tokens):
                continue
            seconds, num_drafted = drafter.draft_seconds[index], drafter.num_drafted[index]
            num_unread = drafter.num_unread[index]
            if num_unread > MAX_UNREAD:
                drafting = num_drafted * drafter.seconds
                self.learned.record_reading(num_unread, seconds - drafting)
                seconds = drafting
            values = drafts.rows[index] - 1, len(path), seconds, num_drafted
            self._record(values, drafts.costs[0])

    def observe(self, round: SpeculationRound) -> None:
        """Record the verification of the last draft, if there was one since the last call."""
        if not self._drafted:
            self.skip(len(round.result.tokens))
            return
        tree, accepted = round.tree, set(round.result.path)
        node = ROOT
        for token, kind in zip(self._drafted, self._kinds, strict=True):
            child = tree.child(node, token)
            if child is None:
                break
            self.learned.rates.record(kind, child in accepted)
            if child not in accepted:
                break
            node = child
        values = (len(tree), round.num_accepted, self._seconds, len(self._drafted))
        self._record(values, round.verify_seconds)
        self._drafted, self.num_undrafted, self.learned.num_undrafted = [], 0, 0

    def _record(self, values: tuple[int, int, float, int], pass_seconds: float) -> None:
        """Record what a draft has brought, as `DraftRecord.record` takes it."""
        if self.learned.record is None:
            self.learned.record = replace(self.expected(pass_seconds))
        learned = self.learned
        learned.num_rounds, self.num_rounds = learned.num_rounds + 1, self.num_rounds + 1
        rates = [
            max(rate, 1 / (PRIOR_ROUNDS + rounds))
            for rate, rounds in ((SHARED_RATE, learned.num_rounds), (OWN_RATE, self.num_rounds))
        ]
        self.learned.record.record(rates[0], *values)
        self.expected(pass_seconds).record(rates[1], *values)

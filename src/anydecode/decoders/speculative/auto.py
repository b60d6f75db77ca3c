"""The default decoder: speculates where drafts save time, and decodes plainly elsewhere.

It measures how often copies from the text, from earlier answers and from the caller's prediction of
the answer are accepted, by match length.
It also measures this for the tokens that the model itself ranked highest when it last scored the
same tokens, drafted or not, and for the tokens of a draft model, if there is one, by their
probability. Before every pass these rates and the measured cost of a pass give the draft with the
most expected tokens per second: none, a chain or a tree. The objective is the goodput of Liu et
al., SmartSpec, arXiv:2406.14066. The draft model runs where its rounds have brought more tokens per
second than the others are expected to.

`draft_sources.py` has the sources, `draft_choice.py` the choice.

The cost includes the rows of every running sequence, so the time that a draft adds to the others
counts against it. Where the backend can, copies are drafted and verified within multi-step bursts
(`kernels/interface.py: BurstDrafts`), of all sequences with one budget, which cost nothing but
their rows; so are the drafts of a drafter that reads the target's states for a sequence that runs
alone, which cost its passes besides. Else drafts alternate with bursts as of the method
`multi-step`. Where no draft can save time, none is searched for. Tokens forced by a constraint are
drafted first, since they are always accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.bounded_table import DEFAULT_MEMORY
from anydecode.decoders.framework.ngram_index import SEPARATOR, NgramIndex
from anydecode.decoders.framework.speculation import Proposal, SpeculationRound, verify_tree
from anydecode.decoders.framework.text_parts import TextParts
from anydecode.decoders.speculative.draft_choice import (
    MIN_GAIN,
    MIN_PROBABILITY,
    CandidateTree,
    best_count,
    best_draft,
    grow_tree,
    min_useful_probability,
    model_rate,
    with_chain,
)
from anydecode.decoders.speculative.draft_sources import (
    MAX_BURST_TOKENS,
    PRIORS,
    SHARED_PRIORS,
    SUCCESSOR_PRIORS,
    TRIAL_SHARE,
    AcceptanceRates,
    CopySource,
    LearnedDrafts,
    ModelSource,
    SharedDrafts,
    SuccessorPredictor,
    burst_path,
)
from anydecode.decoders.speculative.match_cursor import MAX_MATCH_LENGTH, NGRAM_SIZES
from anydecode.decoders.speculative.successors import NUM_SUCCESSORS, Successors
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import (
    MAX_BURST_DRAFTS,
    MAX_SHARED_DRAFTS,
    BurstDrafter,
    BurstDrafts,
    CopyText,
)
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Memory of the most probable successors of one pair of tokens, in bytes.
_BYTES_PER_PAIR = 300
#: The share of passes that is saved by recording the model's top tokens, and by trees of drafts:
#: what a call of the kernels takes beside its passes is compared with it. On texts of the default
#: model, from `anydecode bench draft-priors --prompts 24`: in greedy texts; 0.013 in sampled ones.
SAVED_BY_TOP_TOKENS = 0.012
#: What a call is taken to last beside its passes, in seconds, before one was measured.
DEFAULT_CALL_SECONDS = 0.0005
#: Passes in the first burst of a text. Each further burst may have twice as many, up to as many as
#: the engine allows: the chances of drafts do not change within a burst.
FIRST_BURST_PASSES = 4
#: Outside bursts with drafts of the backend, as many tokens as lie between two drafts, on average,
#: are generated in one multi-step burst, up to `MAX_MULTI_STEP`: in greedy and in sampled texts,
#: the initial frequency of passes with a draft, the number of tokens over which it is averaged,
#: and the limit. `anydecode bench draft-priors` prints the frequency, and what each limit takes.
DRAFT_FREQUENCY = {True: 0.25, False: 0.1}
FREQUENCY_WINDOW = 16
MAX_MULTI_STEP = {True: 4, False: 8}
#: Costs are updated after so many tokens.
COST_TOKENS = 16
#: Weight of a round in the average of what rounds take beside their passes, and of a call or of
#: recorded top tokens in the averages of their durations.
ROUND_RATE, CALL_RATE = 0.05, 0.1
#: Weight of a multi-step burst in company in the average of their numbers of steps, and of a search
#: for a draft in that of those that find one.
SHARED_RATE = 0.1
#: Weight of a burst in company in the average share of passes in which the backend finds a useful
#: draft of a sequence, and the maximum number of bursts without drafts between two that ask for
#: some, where these save less than preparing them takes.
DRAFTED_RATE, MAX_SKIPPED = 0.1, 16
#: After so many rounds in company in which the backend has not drafted, only one in
#: `TRIAL_INTERVAL` asks for it.
MAX_REFUSED, TRIAL_INTERVAL = 64, 16
#: Minimum number of tokens of a sequence that are emitted together where no draft in company can
#: save time, as by `multi-step`; fewer where it ends.
MIN_EMITTED = 8
_EMPTY_TREE = TokenTree()


class _Session:
    """The state of `auto` for one sequence."""

    def __init__(self, sequence: Sequence, decoder: Auto) -> None:
        self.sequence = sequence
        self.max_drafts = decoder.max_drafts
        self.history = NgramIndex(NGRAM_SIZES)
        copy_rates, past_rates, successor_rates = decoder.rates[sequence.sampler.is_greedy]
        self.sources = [CopySource("copy", self.history, copy_rates)]
        self.predictor = SuccessorPredictor(decoder.successors, successor_rates)
        self.sources += [
            CopySource("past", answers, past_rates) for answers in reversed(decoder.past.parts)
        ]
        if sequence.prediction is not None:
            predicted = NgramIndex(NGRAM_SIZES)
            predicted.extend([*sequence.prediction.history, SEPARATOR])
            rates = decoder.prediction_rates[sequence.sampler.is_greedy]
            self.sources.append(CopySource("prediction", predicted, rates))
        self.cost_model = sequence.cost_model
        self.width = 1 + len(sequence.companion_prompts)
        self.is_constrained = constraint_state(sequence.sampler) is not None
        self.draft_seconds = 0.0
        self.model: ModelSource | None = None
        if DRAFT in sequence.optional_runners:
            model = ModelSource(sequence, decoder.learned_drafts[sequence.sampler.is_greedy])
            if decoder.max_model_drafts:
                self.model = model
            else:
                model.pause(True)
        self._decoder = decoder
        self._draft_frequency = DRAFT_FREQUENCY[sequence.sampler.is_greedy]
        self._num_undrafted = 1
        self.optional: list[float] = []  # the probabilities of the last draft's nodes
        self._awaits_states = False  # the next pass computes the states that the draft model reads
        self._allows_multi_step = sequence.end_tokens is not None
        self._max_burst_passes = FIRST_BURST_PASSES
        self._drafts_in_bursts = (
            decoder.drafts_in_bursts(sequence)
            and self.width == 1
            and sequence.samples_in_passes
            and (self.model is None or self.model.drafts_in_bursts)
        )
        # Seconds of passes with 0, 1, ... drafts, and the same with what plain decoding and rounds
        # take beside them.
        self._passes: tuple[float, ...] = (0.0,)
        self._costs: tuple[float, ...] = (0.0,)
        self._seconds_per_sequence = 0.0  # the same, per sequence in the pass
        self._min_useful_probability = 0.0  # of the most probable node of a draft
        self._costs_key = (-1, -1)
        self._shared_drafts = decoder.shared_drafts[sequence.sampler.is_greedy]
        # Of this sequence's passes in company: those with a useful draft.
        self._drafted_share = self._shared_drafts.share
        self._num_to_skip, self._num_skipped = 0, 1  # bursts in company without drafts
        self._has_skipped = False  # such a burst since the text was read
        # The costs of passes in company, the least probability of a draft that saves time in them,
        # and what they were computed for.
        self._shared_costs: tuple[float, ...] = ()
        self._min_shared, self._shared_key = 0.0, (-1, -1)

    def _catch_up(self) -> None:
        """Read the tokens generated since the last call, and at first the prompt, which takes time
        only where drafts may save some. Tokens of bursts without drafts are not followed one by
        one, and count for no rate."""
        prompt, history = self.sequence.prompt, self.history
        if not len(history):
            # Cursors follow its last tokens only: matches are no longer when they are found.
            first = max(0, len(prompt) - MAX_MATCH_LENGTH)
            history.extend(prompt[:first])
            self._read(prompt[first:], scored=False)
        tokens = self.sequence.tokens[len(history) - len(prompt) :]
        if not self._has_skipped:
            self._read(tokens)
            return
        self._has_skipped = False
        self._skip_reading(tokens)
        for source in self.sources:
            source.cursor.search(history.tokens)

    def _skip_reading(self, tokens: Seq[int]) -> None:
        """Take `tokens` into the history without following them."""
        self.history.extend(tokens)
        for source in self.sources:
            source.restart()

    def _read(self, tokens: Seq[int], scored: bool = True) -> None:
        text, append = self.history.tokens, self.history.append
        for token in tokens:
            if scored and self.predictor.successors and len(text) > 1:
                self.predictor.read(text[-2], text[-1], token)
            append(token)
            for source in self.sources:
                source.read(text, scored)

    def draft(self) -> Proposal:
        """The draft for the next pass, or an empty tree; its nodes are `optional` where other
        sequences run."""
        sequence = self.sequence
        self._awaits_states, self.optional = False, []
        num_others = self.cost_model.num_others()
        if self.model is not None and num_others:
            self.model.pause(True)
        if num_others and sequence.length - sequence.kv_cache().length > 1:
            self._seconds_per_sequence = self._plain_seconds(num_others)
            return _EMPTY_TREE  # before the prompt is scored
        costs = self._pass_costs(num_others)
        max_drafts = min(self.max_drafts, sequence.remaining - 1)
        if (
            self._min_useful_probability > 1.0
            or max_drafts < 1
            or sequence.length - sequence.kv_cache().length > 1
        ):
            return _EMPTY_TREE  # no draft can save time, at the end, or before the prompt is scored
        self._catch_up()
        state = constraint_state(sequence.sampler) if self.is_constrained else None
        forced = state.forced_tokens()[:max_drafts] if state is not None else []
        costs = costs[: max_drafts + 1]
        candidates = CandidateTree([], [], [], [])
        # Checked before growing a tree: growing trees that save no time would make `auto` slower
        # than plain decoding.
        if forced or self._max_probability() >= self._min_useful_probability:
            candidates = self._candidates(forced, costs, num_others)
        count, rate = best_draft(candidates.probabilities, costs, num_others, self.draft_seconds)
        model_pays = not forced and not num_others and self._model_pays(costs, rate)
        if self.model is not None:
            self.model.pause(not model_pays)
        if model_pays:
            assert self.model is not None
            if not sequence.can_draft():
                self._awaits_states = True
                return _EMPTY_TREE
            chain = yield from self.model.draft(
                min(self._decoder.max_model_drafts, max_drafts), self._min_path_probability(costs)
            )
            candidates = with_chain(candidates, chain, self.model.name)
            count = best_count(candidates.probabilities, costs, num_others, 0.0)
        if num_others and count and state is None:
            # The pass takes those that save time beside the drafts of the others.
            count = len(candidates.tokens)
            self.optional = candidates.probabilities
        tree = candidates.first(count)
        if state is not None and len(tree):
            tree = pruned([], tree, state)
        return tree

    def _model_pays(self, costs: Seq[float], rate: float) -> bool:
        """Whether to draft with the draft model: a round with it is expected to bring more than
        `rate` tokens per second, or none has been tried for long."""
        model = self.model
        if model is None:
            return False
        own_rate = model_rate(model.expected(self._passes[0]), costs)
        if not self._reading_pays(model, own_rate, rate):
            return False
        return model.is_due or own_rate > rate

    def _reading_pays(self, model: ModelSource, own_rate: float, rate: float) -> bool:
        """Whether what the draft model is expected to save in the rest of the answer is more than
        reading the text takes it, or little compared with the time in which it has not drafted.
        Answers are taken to go on for as long as others have been.

        Args:
            model: The draft model.
            own_rate: Tokens per second with its drafts.
            rate: The same without them.
        """
        reading = model.reading_seconds(self._passes[0])
        if not reading:
            return True
        remaining = float(self.sequence.remaining)
        if end_rate := self.cost_model.end_rate():
            remaining = min(remaining, 1 / end_rate)
        if reading * rate * own_rate < remaining * (own_rate - rate):
            return True
        return model.is_due and reading * rate < TRIAL_SHARE * model.learned.num_undrafted

    def _min_path_probability(self, costs: Seq[float]) -> float:
        """The probability of a path of the draft model from which one more draft saves no time."""
        assert self.model is not None
        count = min(4, len(costs) - 1)
        row = (costs[count] - costs[0]) / count
        seconds = row + self.model.expected(self._passes[0]).seconds_per_draft
        return min(0.9, seconds / (costs[0] * self.model.learned.mean_rate()))

    def multi_step_count(self, tree: TokenTree) -> int:
        """The number of tokens to generate before the next search for a draft, given the draft just
        found; 0: verify the draft or decode plainly. The first token of an answer is generated
        alone."""
        self._draft_frequency += min(1.0, self._num_undrafted / FREQUENCY_WINDOW) * (
            bool(len(tree)) - self._draft_frequency
        )
        if self.cost_model.num_others():
            self._decoder.record_search(len(tree) > 0, self._drafts_in_bursts)
        self._num_undrafted = 1
        if len(tree) or self._awaits_states or not self._can_multi_step():
            return 0
        if self.sequence.tokens:
            limit = self._decoder.max_multi_step(self.sequence.sampler.is_greedy)
            self._num_undrafted = int(1 / max(self._draft_frequency, 1 / limit))
        return self._num_undrafted

    def _can_multi_step(self) -> bool:
        """Whether tokens may be generated in multi-step bursts: tokens need not be checked one by
        one, and a call for each pass would take more than learning from its logits saves."""
        return self._allows_multi_step and self._decoder.multi_step_pays(
            self._seconds_per_sequence,
            measures_calls=self._drafts_in_bursts and not self.cost_model.num_others(),
        )

    def can_draft_in_bursts(self) -> bool:
        """Whether the backend can draft by itself in multi-step bursts: nothing is drafted but
        copies, and chains of a drafter that can run in them, with siblings of their first tokens.
        Other sequences share the bursts."""
        sequence = self.sequence
        return (
            self._drafts_in_bursts
            and bool(sequence.tokens)
            and sequence.length - sequence.kv_cache().length == 1
            and self._can_multi_step()
            and (not self.cost_model.num_others() or self._decoder.shares_bursts)
        )

    def bursts(self) -> Decoding:
        """Generate tokens in multi-step bursts, with drafts that the backend finds."""
        return self._shared_bursts() if self.cost_model.num_others() else self._burst_alone()

    def _shared_bursts(self) -> Decoding:
        """Generate tokens in bursts with other sequences, as long as there are some. The backend
        drafts copies for all of them with one budget. Where drafts are expected to save less than
        preparing them takes, it drafts in one of several bursts, at least one of `MAX_SKIPPED +
        1`."""
        sequence, decoder, cost_model = self.sequence, self._decoder, self.cost_model
        if self.model is not None:
            self.model.pause(True)
        while not sequence.finished and (num_others := cost_model.num_others()):
            room, drafts, min_count = min(MAX_BURST_TOKENS, sequence.remaining), None, 1
            start_time = perf_counter()
            if self._num_to_skip:
                self._num_to_skip -= 1
                sequence.needs_weight = not self._num_to_skip
            elif self._may_share(num_others):
                # A backend's drafts take no time but their rows', and need no minimum gain.
                costs = np.array(self._shared_costs)
                given = self._texts(room), costs, 1.0, MIN_PROBABILITY
                drafts = BurstDrafts(*given, max_passes=MAX_BURST_TOKENS)
                seconds = perf_counter() - start_time
            else:
                min_count = MIN_EMITTED
            self._has_skipped |= drafts is None
            request = sequence.multi_step(room, drafts, min_count)
            tokens = yield request
            if self.model is not None:
                self.model.skip(len(tokens))
            if drafts is not None:
                self._count_predictions(drafts, tokens)
            if sequence.trace is not None:
                if drafts is not None and drafts.rows:
                    self._trace_burst(drafts, _tokens_of_steps(drafts, tokens))
                else:
                    self._trace_undrafted(tokens, (perf_counter() - start_time) / len(tokens))
            sequence.emit(tokens, request.sampler)
            if drafts is not None:
                start_time = perf_counter()
                self._follow(drafts, tokens)
                seconds += perf_counter() - start_time
                self._record_shared(drafts, len(tokens), seconds)
                if not decoder.shares_bursts:
                    return

    def _may_share(self, num_others: int) -> bool:
        """Whether a draft of this sequence may save time in a pass beside so many others. For what
        its tokens count for, the engine weighs them now and then, at the same time as those of
        sequences that have begun together."""
        sequence = self.sequence
        key = (num_others, len(sequence.tokens) // COST_TOKENS)
        if is_new := key != self._shared_key:
            max_drafts = min(self.max_drafts, MAX_SHARED_DRAFTS)
            costs = self.cost_model.pass_seconds(num_others + 1, max_drafts, sequence.length)
            self._shared_costs, self._shared_key = costs, key
            self._min_shared = min_useful_probability(costs, num_others, 1.0)
        best = max(max(source.rates.bounds) for source in self.sources)
        sequence.needs_weight = is_new and self._min_shared < best
        return self._min_shared < best * max(sequence.token_weight, MIN_PROBABILITY)

    def _texts(self, room: int) -> list[CopyText]:
        """The texts that the backend copies from, the first with room for so many tokens. The
        backend searches them for what was not read: the prompt is not indexed here."""
        sequence, num_known = self.sequence, len(self.history)
        num_prompt = len(sequence.prompt)
        unread = [*sequence.prompt[num_known:], *sequence.tokens[max(0, num_known - num_prompt) :]]
        if unread and not self.predictor.successors:
            self._skip_reading(unread)
            self._has_skipped = False
        else:
            self._catch_up()
        return [source.as_text(room * (index == 0)) for index, source in enumerate(self.sources)]

    def _follow(self, drafts: BurstDrafts, tokens: Seq[int]) -> None:
        """Take over what the backend has read of the tokens of a burst. If there is more to learn
        from them, or it has read none, `_catch_up` reads them."""
        if drafts.num_read != len(tokens) or self.predictor.successors:
            return
        self.history.extend(tokens)
        for source, found in zip(self.sources, drafts.matches, strict=True):
            source.follow(found)

    def _record_shared(self, drafts: BurstDrafts, num_tokens: int, seconds: float) -> None:
        """Record what drafts have brought in a burst in company, and choose when to ask for drafts
        again. How often this sequence has a useful one is its own; what such drafts save differs
        much from burst to burst, and is taken from those of all sequences.

        Args:
            drafts: The drafts of the burst.
            num_tokens: Its tokens.
            seconds: The time of preparing and reading the drafts.
        """
        rows, num_passes, costs = drafts.rows, len(drafts.rows), drafts.costs
        self._decoder.record_sharing(num_passes > 0)
        if not num_passes:
            return
        self._shared_drafts.record(rows, max(0, num_tokens - num_passes), seconds)
        share = sum(count > 1 for count in rows) / num_passes
        self._drafted_share += DRAFTED_RATE * (share - self._drafted_share)
        num_drafted = self._drafted_share * num_passes
        token_seconds = drafts.weight * costs[0] / (self.cost_model.num_others() + 1)
        row_seconds = float(((costs[1:] - costs[0]) / np.arange(1, len(costs))).min())
        if self._shared_drafts.pays(num_drafted, token_seconds, row_seconds):
            self._num_skipped = 1
        else:
            self._num_skipped = self._num_to_skip = min(2 * self._num_skipped, MAX_SKIPPED)

    def _burst_alone(self) -> Decoding:
        """Generate tokens in a burst in which no other sequence runs."""
        sequence, decoder = self.sequence, self._decoder
        first = self._pass_costs(0)[0]
        room = min(MAX_BURST_TOKENS, sequence.remaining)
        texts = self._texts(room)
        passes = self._passes[: min(sequence.remaining, MAX_BURST_DRAFTS + 1)]
        steps = [first + seconds - passes[0] for seconds in passes]
        drafter = self._burst_drafter(steps)
        drafts = BurstDrafts(
            texts,
            np.array(steps),
            MIN_GAIN,
            MIN_PROBABILITY,
            drafter,
            self._max_burst_passes,
        )
        self._max_burst_passes = min(2 * self._max_burst_passes, MAX_BURST_TOKENS)
        start_time = perf_counter()
        request = sequence.multi_step(room, drafts)
        tokens = yield request
        seconds = perf_counter() - start_time
        tokens_of_steps = _tokens_of_steps(drafts, tokens)
        drafter = drafts.drafter
        if drafter is not None:
            seconds -= sum(drafter.draft_seconds)
        if drafts.rows and not self.cost_model.num_others():
            extra = sum(steps[rows - 1] - steps[0] for rows in drafts.rows)
            decoder.record_step((seconds - extra) / len(drafts.rows), passes[0])
            decoder.record_call(seconds - sum(drafts.seconds))
        if self.model is not None and drafter is not None:
            self.model.observe_burst(drafter, drafts, tokens_of_steps)
        elif self.model is not None:
            self.model.skip(len(tokens))
        self._count_predictions(drafts, tokens)
        if sequence.trace is not None:
            self._trace_burst(drafts, tokens_of_steps)
            if not drafts.rows:  # the backend has not drafted
                self._trace_undrafted(tokens, seconds)
        sequence.emit(tokens, request.sampler)
        self._follow(drafts, tokens)

    def _burst_drafter(self, costs: Seq[float]) -> BurstDrafter | None:
        """The drafter of the next burst, if its drafts may save time."""
        model = self.model
        if model is None:
            return None
        rate = model_rate(model.expected(self._passes[0]), costs)
        plain = MIN_GAIN / costs[0]
        pays = len(costs) > 1 and (model.is_due or rate > plain)
        pays = pays and self._reading_pays(model, rate, plain)
        model.pause(not pays)
        if not pays:
            return None
        return model.in_burst(
            rate, self._passes[0], self._decoder.max_model_drafts, MAX_BURST_TOKENS
        )

    def _count_predictions(self, drafts: BurstDrafts, tokens: Seq[int]) -> None:
        """Count the drafts of a burst that the caller's prediction of the answer has. `tokens`:
        those of the burst, which were not emitted yet."""
        prediction = self.sequence.prediction
        if prediction is None:
            return
        text = self.sequence.all_tokens[-2:]
        for index, following in enumerate(_tokens_of_steps(drafts, tokens)):
            prediction.record(text, *_scored_tree(drafts, index, following))
            text = [*text, *following][-2:]

    def _trace_burst(self, drafts: BurstDrafts, tokens_of_steps: Seq[Seq[int]]) -> None:
        """Record each step of a burst."""
        position = self.sequence.length
        for index, tokens in enumerate(tokens_of_steps):
            tree, accepted = _scored_tree(drafts, index, tokens)
            drafting = 0.0 if drafts.drafter is None else drafts.drafter.draft_seconds[index]
            facts = {
                "position": position,
                "draft_seconds": drafting,
                "verify_seconds": drafts.seconds[index],
            }
            self.sequence.record(tree, accepted, tokens, **facts)
            position += len(tokens)

    def _trace_undrafted(self, tokens: Seq[int], seconds_per_token: float) -> None:
        """Record steps without drafts."""
        for position, token in enumerate(tokens, self.sequence.length):
            facts = {
                "position": position,
                "draft_seconds": 0.0,
                "verify_seconds": seconds_per_token,
            }
            self.sequence.record(_EMPTY_TREE, [], [token], **facts)

    def multi_step(self, count: int) -> Decoding:
        """Generate `count` tokens without drafts, in bursts where the backend supports them: in one
        if the sequence runs alone, else in a single one, which other sequences may end early."""
        sequence, decoder = self.sequence, self._decoder
        is_alone, start = not self.cost_model.num_others(), len(sequence.tokens)
        while not sequence.finished and (remaining := start + count - len(sequence.tokens)) > 0:
            start_time = perf_counter()
            request = sequence.multi_step(remaining, min_count=None if is_alone else 1)
            tokens = yield request
            seconds_per_token = (perf_counter() - start_time) / len(tokens)
            if is_alone and len(tokens) > 1:
                decoder.record_step(seconds_per_token, self._passes[0])
            if sequence.trace is not None:
                self._trace_undrafted(tokens, seconds_per_token)
            sequence.emit(tokens, request.sampler)
            if not is_alone:
                decoder.record_shared(len(tokens))
                break
        self._num_undrafted = len(sequence.tokens) - start
        if self.model is not None:
            self.model.skip(self._num_undrafted)

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
        """Record the model's most probable successors of every scored node, accepted or not, and
        what a draft model's draft has brought. `root` is the position of the token that the draft
        followed."""
        tree, text = round.tree, self.history.tokens
        if self.model is not None:
            self.model.observe(round)
        if (
            self._can_multi_step()
            or not self._decoder.learning_pays(self._seconds_per_sequence)
            or root < 1
            or len(round.scores) != len(tree) + 1
        ):
            return
        self._catch_up()
        start = perf_counter()
        learn = self.predictor.successors.learn
        best = round.scores.top(NUM_SUCCESSORS)[0].tolist()
        learn(text[root - 1], text[root], best[0])
        for token, parent, top_tokens in zip(tree.tokens, tree.parents, best[1:], strict=True):
            learn(text[root] if parent == ROOT else tree.tokens[parent], token, top_tokens)
        self._decoder.record_learning(perf_counter() - start)

    def _candidates(self, forced: list[int], costs: Seq[float], num_others: int) -> CandidateTree:
        """`forced` and nodes after it that may save time."""
        sources = self.sources
        if forced:
            sources = [source.advanced(self.history.tokens, forced) for source in sources]
        sources = [source for source in sources if source.probability() >= MIN_PROBABILITY]
        max_nodes = len(costs) - 1 - len(forced)
        # A node less probable than the cost of the cheapest row in tokens cannot save time.
        tokens_per_second = (num_others + 1) / costs[0]
        min_probability = (
            min((cost - costs[0]) / n for n, cost in enumerate(costs) if n) * tokens_per_second
        )
        min_probability = max(min_probability, MIN_PROBABILITY)
        return grow_tree(
            self.history.tokens, sources, self.predictor, max_nodes, min_probability, forced
        )

    def _plain_seconds(self, num_others: int) -> float:
        """This sequence's share of the time of a pass without drafts."""
        rows = num_others + self.width
        passes = self.cost_model.pass_seconds(rows, 0, self.sequence.length, self.width)
        return passes[0] / (num_others + 1)

    def _pass_costs(self, num_others: int) -> tuple[float, ...]:
        """The costs of passes with 0 to `max_drafts` drafts, including the rows of all other
        sequences. Updated when `num_others` changes, and every `COST_TOKENS` tokens."""
        key = (num_others, self.sequence.length // COST_TOKENS)
        if key != self._costs_key:
            decoder, length = self._decoder, self.sequence.length
            rows = num_others + self.width
            passes = self.cost_model.pass_seconds(rows, self.max_drafts, length, self.width)
            self._passes = self._costs = passes
            self._seconds_per_sequence = passes[0] / (num_others + 1)
            if self._can_multi_step() and not num_others:  # plain decoding is multi-step then
                rounds = (seconds + decoder.round_seconds for seconds in passes[1:])
                self._costs = (passes[0] * decoder.multi_step_cost, *rounds)
            elif self._can_multi_step():
                # What bursts save of the work beside passes, unless another sequence drafts anyway.
                saved = 1.0 - 1.0 / decoder.shared_steps
                saved *= (1.0 - decoder.draft_share) ** num_others
                host_seconds = self.cost_model.host_seconds(num_others + 1)
                first = max(0.5 * passes[0], passes[0] - saved * host_seconds)
                self._costs = (first, *passes[1:])
            self._min_useful_probability = min_useful_probability(self._costs, num_others)
            self._costs_key = key
        return self._costs

    def record_seconds(self, drafting: float, verification: float, num_drafts: int) -> None:
        """Update the averages of the seconds that a draft takes, and of those that its round takes
        beside the pass.

        Args:
            drafting: Seconds that the last draft took.
            verification: Seconds from then to the end of its round.
            num_drafts: Its tokens.
        """
        self.draft_seconds += 0.1 * (drafting - self.draft_seconds)
        if self._can_multi_step() and not self.cost_model.num_others():
            decoder = self._decoder
            excess = verification - self._passes[num_drafts]
            decoder.num_rounds += 1
            rate = max(ROUND_RATE, 1 / decoder.num_rounds)
            excess = min(max(excess, 0.0), self._passes[0])
            decoder.round_seconds += rate * (excess - decoder.round_seconds)


def _scored_tree(drafts: BurstDrafts, index: int, tokens: Seq[int]) -> tuple[TokenTree, list[int]]:
    """The draft of a pass of a burst with its sibling, and its accepted nodes, given the tokens of
    the pass."""
    draft, sibling = drafts.drafts[index], drafts.siblings[index]
    accepted = burst_path(draft, sibling, tokens)
    parents = list(range(-1, len(draft) - 1))
    if sibling is not None:
        draft, parents = [*draft, sibling], [*parents, ROOT]
    name = "copy" if drafts.sources[index] < len(drafts.texts) else "model"
    return TokenTree(draft, parents, sources=[name] * len(draft) or None), accepted


def _tokens_of_steps(drafts: BurstDrafts, tokens: Seq[int]) -> list[Seq[int]]:
    """The tokens of each pass of a burst, given those of all: the accepted ones of its draft and
    the one after them. The last pass has none after them where the text has ended, or where its
    sample is left to the sampler."""
    parts: list[Seq[int]] = []
    for draft, sibling in zip(drafts.drafts, drafts.siblings, strict=True):
        count = len(burst_path(draft, sibling, tokens)) + 1
        parts.append(tokens[:count])
        tokens = tokens[count:]
    return parts


@register(
    Card(
        "auto",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066), its objective",
        exactness="token-exact",
        summary=(
            "Chooses the draft source, chain or tree and size before every pass;"
            " decodes plainly where no draft saves time."
        ),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "lengths are chosen per request and pass, from acceptance rates by match length, not"
            " from one moving average",
            "acceptance rates start from what `anydecode bench draft-priors` measured on texts of"
            " the default model, and count with their lower bounds",
            "a draft must gain 2 %; costs are measured while the engine runs, not profiled"
            " beforehand",
            "the kernels choose the drafts within multi-step bursts, if all sequences allow bursts"
            " and the samplers have no more than a temperature, top-k, top-p and min-p: chains of"
            " the most probable source: copies or, for a sequence that runs alone, those of a"
            " drafter that reads the target's states, with its second choice of the first token"
            " beside it where the row promises more than it costs",
            "in such bursts beside other sequences a draft need not gain 2 %, but drafts are"
            " prepared only now and then for sequences in which they are expected to save less"
            " than preparing them takes, both as measured; unless requests wait, the tokens of a"
            " sequence count for what they save: its row, or the pass if it ends last",
            "in bursts a drafter reads no more than the last 64 tokens of the text before its first"
            " draft, so that it would gain little from a prefix cache, and has none",
            "else a sequence that runs alone decodes up to four tokens (eight if it is sampled) per"
            " burst between drafts; drafts are not searched for meanwhile",
            "tokens forced by a constraint are drafted wherever drafts can save time",
            "earlier answers are kept in eight parts within half of `memory`; the oldest part is"
            " dropped when they are full; the model's most probable tokens have the other half",
            "token-exact alone: its drafts depend on measured times and on the load, so that with"
            " another acceptance rule the text would too",
        ),
        bounds={"memory": Range(0, 1 << 40)},
        remote={"max_drafts": Range(1, 64), "max_model_drafts": Range(0, 64)},
    )
)
class Auto(Decoder):
    """The default decoder: drafts that save time, chosen before every pass.

    Args:
        max_drafts: Maximum number of drafts per pass.
        memory: Memory of earlier answers and of the model's most probable tokens, in bytes.
        max_model_drafts: Maximum number of tokens that a draft model drafts in a round; 0: it does
            not run.
    """

    requirements = Requirements(takes_prediction=True, optional_runners=(DRAFT,), reads_states=True)

    def __init__(
        self, max_drafts: int = 32, memory: int = DEFAULT_MEMORY, max_model_drafts: int = 8
    ) -> None:
        if max_drafts < 1 or memory < 0 or max_model_drafts < 0:
            raise InvalidRequestError(
                "auto needs max_drafts >= 1, memory >= 0 and max_model_drafts >= 0"
            )
        self.max_drafts = max_drafts
        self.memory = memory
        self.max_model_drafts = max_model_drafts
        self.acceptance = TokenExact()
        self.multi_step_cost = 1.0  # of a multi-step token, relative to a pass over one row
        self.shared_steps = 1.0  # of multi-step bursts in company
        self.draft_share = 0.5  # of searches in company: those that have found a draft
        self.round_seconds = 0.0  # that a round with drafts takes beside its pass
        self.num_rounds = 0  # measured ones
        self.call_seconds = DEFAULT_CALL_SECONDS  # of a call of the kernels, beside its passes
        self.num_calls = 0  # measured ones
        self.num_refused = 0  # rounds in company since the backend drafted in one
        self.learning_seconds = 0.0  # that recording the top tokens of a round takes
        self.clear()

    def clear(self) -> None:
        """Reset everything learned from earlier requests."""
        self.past = TextParts(self.memory // 2, lambda: NgramIndex(NGRAM_SIZES))
        self.successors = Successors()
        self.rates = {
            greedy: (
                AcceptanceRates(prior),
                AcceptanceRates(prior),
                AcceptanceRates(SUCCESSOR_PRIORS[greedy]),
            )
            for greedy, prior in PRIORS.items()
        }
        self.learned_drafts = {greedy: LearnedDrafts() for greedy in PRIORS}
        self.shared_drafts = {
            greedy: SharedDrafts(*prior) for greedy, prior in SHARED_PRIORS.items()
        }
        self.prediction_rates = {greedy: AcceptanceRates(prior) for greedy, prior in PRIORS.items()}

    def record_step(self, seconds: float, pass_seconds: float) -> None:
        """Record the duration of a step of a multi-step burst, relative to a pass over one row."""
        relative_cost = min(max(seconds / pass_seconds, 0.5), 2.0)
        self.multi_step_cost += 0.1 * (relative_cost - self.multi_step_cost)

    def record_shared(self, num_steps: int) -> None:
        """Record the number of steps of a multi-step burst in company."""
        self.shared_steps += SHARED_RATE * (num_steps - self.shared_steps)

    def record_search(self, has_found: bool, could_share: bool) -> None:
        """Record whether a search in company has found a draft, and whether the backend could have
        drafted instead."""
        self.num_refused += could_share
        self.draft_share += SHARED_RATE * (has_found - self.draft_share)

    def record_call(self, seconds: float) -> None:
        """Record what a multi-step burst took beside its passes and its drafter's. The average
        follows shorter calls faster than longer ones, which include other work of the machine."""
        change = max(0.0, seconds) - self.call_seconds
        self.num_calls += 1
        rate = 1.0 if self.num_calls == 1 else 0.5 if change < 0 else CALL_RATE
        self.call_seconds += rate * change

    def multi_step_pays(self, pass_seconds: float, measures_calls: bool) -> bool:
        """Whether passes of so many seconds per sequence are better computed several in a call than
        in calls of their own, which allow to learn from their logits and to draft trees. They are
        until calls were measured, if this sequence measures them."""
        if measures_calls and not self.num_calls:
            return True
        return SAVED_BY_TOP_TOKENS * pass_seconds < self.call_seconds

    def drafts_in_bursts(self, sequence: Sequence) -> bool:
        """Whether the backend drafts for a sequence in multi-step bursts, if nothing else speaks
        against it."""
        return sequence.drafts_in_bursts

    def max_multi_step(self, is_greedy: bool) -> int:
        """The maximum number of tokens between two searches for a draft outside such bursts."""
        return MAX_MULTI_STEP[is_greedy]

    @property
    def shares_bursts(self) -> bool:
        """Whether to ask for bursts in company, which need that all other sequences decode plainly
        or in such bursts too."""
        return self.num_refused < MAX_REFUSED or self.num_refused % TRIAL_INTERVAL == 0

    def record_sharing(self, is_granted: bool) -> None:
        """Record whether a burst in company had drafts of the backend."""
        self.num_refused = 0 if is_granted else self.num_refused + 1

    def record_learning(self, seconds: float) -> None:
        """Record how long it took to record the top tokens of a round."""
        self.learning_seconds += CALL_RATE * (seconds - self.learning_seconds)

    def learning_pays(self, pass_seconds: float) -> bool:
        """Whether recording top tokens saves more than it takes, by passes of so many seconds per
        sequence."""
        return SAVED_BY_TOP_TOKENS * pass_seconds > self.learning_seconds

    @property
    def num_bytes(self) -> int:
        return self.past.num_bytes + _BYTES_PER_PAIR * len(self.successors)

    def decode(self, sequence: Sequence) -> Decoding:
        session = _Session(sequence, self)
        while not sequence.finished:
            if session.can_draft_in_bursts():
                yield from session.bursts()
                continue
            start, root = perf_counter(), sequence.length - 1
            tree = yield from session.draft()
            if count := session.multi_step_count(tree):
                yield from session.multi_step(count)
                continue
            draft_seconds, start = perf_counter() - start, perf_counter()
            round = yield from verify_tree(
                sequence, tree, self.acceptance, draft_seconds, session.optional
            )
            session.observe(round, root)
            if len(tree):
                session.record_seconds(draft_seconds, perf_counter() - start, len(tree))
        self._learn(sequence.tokens)

    def _learn(self, answer: list[int]) -> None:
        self.successors.limit(self.memory // 2 // _BYTES_PER_PAIR)
        if self.memory:
            self.past.extend([*answer, SEPARATOR])

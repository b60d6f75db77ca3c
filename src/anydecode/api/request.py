"""A user's request: validates the options, creates one engine job per sample, and builds the
result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from anydecode.api.adapters import LoadedAdapter
from anydecode.api.first_finish import FirstFinish, SampleState
from anydecode.api.generation import Generation, Stats, StreamChunk
from anydecode.api.resources import Resources
from anydecode.api.sample_order import SampleOrder, check_samples, num_ranked
from anydecode.api.scoring import PROMPT_KEY, EmptyDecoder, PromptLogprobsDecoder
from anydecode.api.segment_rollout import Segment, UnfinishedSample
from anydecode.api.text import OutputProcessor, completing_tokens
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.thinking_budget import ThinkingBudget, next_message
from anydecode.constraints.tools.tool_calls import ToolCalls
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.constrained.banned_strings import BannedStrings
from anydecode.decoders.constrained.validate_and_retry import enforcement_report, validate_and_retry
from anydecode.decoders.decoder import Decoder
from anydecode.engine.engine import Job
from anydecode.errors import (
    AnydecodeError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.sampling.constrained import ConstraintState
from anydecode.sampling.logprobs import TokenLogprobs, distribution_logprobs, token_logprobs
from anydecode.sampling.noise import Noise, fresh_seed, stream_id
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.prediction import Prediction
from anydecode.scoring.prompt_embeds import (
    PROMPT_EMBEDS,
    PromptEmbeds,
    check_disjoint,
    prefix_namespace,
)
from anydecode.scoring.ranked import RANKED
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.state import StateKey

log = logging.getLogger("anydecode")

#: Number of tokens that earlier calls have generated.
RESUMED: StateKey[int] = StateKey("request", "resumed")

#: Default of `max_tokens`.
DEFAULT_TOKENS = 256


class Request:
    """One prompt with its options. `LLM.request` creates it, `LLM.start` runs it.

    Args:
        resources: The models, their memory, and the tokenizers.
        prompt: Token ids.
        decoder: The decoding method.
        params: Sampling parameters.
        name: The decoder's name in messages and results.
        constraint: A `Constraint`, a constraint state, or None.
        adapter: The LoRA adapter; None for none.
        trace: Whether to record every decoding round.
        priority: For schedules that use it; smaller numbers come first.
        namespace: Cached prefixes are shared only within a namespace.
        companion: Token ids of the second prompt of guidance.
        first_finish: Which of `n` samples to keep, or None for all.
        segment: The part of the generation that this call runs.
        prompt_embeds: Embeddings that replace some of the prompt's tokens.
        prediction: Token ids of the expected answer.

    Attributes:
        sampling_defaults: Those of `params` that are defaults of the `LLM`.

    Raises:
        InvalidRequestError: If an option is invalid or contradicts another.
    """

    sampling_defaults: Mapping[str, float] = {}

    def __init__(
        self,
        resources: Resources,
        prompt: list[int],
        decoder: Decoder,
        params: SamplingParams,
        *,
        name: str = "",
        constraint: Constraint | ConstraintState | None = None,
        adapter: LoadedAdapter | None = None,
        trace: bool = False,
        priority: int = 0,
        namespace: Hashable = None,
        companion: list[int] | None = None,
        first_finish: FirstFinish | None = None,
        segment: Segment | None = None,
        prompt_embeds: Seq[PromptEmbeds] = (),
        prediction: list[int] | None = None,
    ) -> None:
        self.resources = resources
        self.prompt = prompt
        self._has_companion = companion is not None
        self.companion = companion or prompt[-1:]
        self.params = params
        self.name = name
        self.adapter = adapter
        self.segment = segment or Segment()
        self.first_finish = first_finish
        self.prompt_embeds = tuple(prompt_embeds)
        names = [(one.first, one.name) for one in self.prompt_embeds]
        self.namespace = prefix_namespace(namespace, names)
        self._needs = decoder.requirements
        can_draft = decoder.requirements.takes_prediction
        self.prediction = None
        if prediction and can_draft:
            self.prediction = prediction[: resources.max_length]  # an answer is not longer
        self.ignored = ["prediction"] if prediction and not can_draft else []
        self.seed = self._resolve_seed()
        self.limit = self._check(decoder)
        if isinstance(constraint, Constraint):
            constraint = constraint.for_prompt(resources.tokenizer.decode(prompt))
        self.constraint = constraint if isinstance(constraint, Constraint) else None
        samples = self._samples(decoder, constraint)
        self._numbers = [sample.number for sample in samples]
        self._start_time = perf_counter()
        self._first_token_times: list[float | None] = [None] * len(samples)
        self._num_first_tokens = [1] * len(samples)
        self._end_times: list[float | None] = [None] * len(samples)
        self._on_progress: Callable[[], Any] | None = None
        self._order = SampleOrder.of(decoder.requirements, params, len(samples), self.limit)
        tokenizer = resources.tokenizer
        self._stop_rules = OutputProcessor(
            tokenizer,
            params.stop,
            params.stop_tokens,
            tokenizer.eos_ids,
            None,
            params.ignore_eos,
            params.include_stop,
            params.min_tokens,
            completing_tokens(tokenizer, resources.model.spec.vocab_size, params.stop),
        )
        self.jobs = [
            self._job(index, sample, decoder, constraint, trace, priority)
            for index, sample in enumerate(samples)
        ]

    @property
    def first_jobs(self) -> Seq[Job]:
        """The jobs to submit; others may follow at their end."""
        return self._order.first(self.jobs)

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def is_search(self) -> bool:
        """Whether the samples are texts of one search: they end together, and may be fewer than
        `n`."""
        return self._order is SampleOrder.RANKED

    @property
    def has_text(self) -> bool:
        """Whether `take_text` would return text."""
        return self._output_processor(0).has_text

    def take_text(self, number: int = 0) -> str:
        """The text of sample `number` that has become final since the last call."""
        return self._output_processor(number).take()

    def text(self, number: int = 0) -> str:
        """All text of sample `number` so far, except an end that may become a stop string."""
        return self._output_processor(number).text

    def stop_string(self, number: int = 0) -> str | None:
        """The stop string that ended sample `number`, if one did."""
        stopped_by = self._output_processor(number).stopped_by
        return stopped_by if isinstance(stopped_by, str) else None

    def notify(self, callback: Callable[[], Any]) -> None:
        """Call `callback` on the engine's thread when there are new tokens or trace entries, and at
        the end."""
        self._on_progress = callback

    def last_chunk(self) -> StreamChunk:
        """The remaining text with the result. Raises the error that ended the request, if any."""
        generation = self.generation()
        return StreamChunk(self.take_text(), generation)

    def generation(self) -> Generation:
        """The result. Raises the error that ended the request, if any."""
        for job in self.jobs:
            if isinstance(job.error, AnydecodeError):
                raise job.error
            if job.error is not None:
                raise RuntimeError(f"decoder {self.name!r} failed: {job.error!r}") from job.error
        samples = [self._sample(number) for number in self.shown]
        samples[0].samples = samples
        samples[0].resume = self._resume()
        return samples[0]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per token of the prompt, None for the first. None if they were not requested or
        are not complete yet."""
        logprobs = self.jobs[0].sequence.state.get(PROMPT_KEY)
        if logprobs is None or len(logprobs) < len(self.prompt) - 1:
            return None
        return [None, *logprobs]

    @property
    def shown(self) -> list[int]:
        """The samples in the result: all of them, those that a search has found, or those that
        finished first."""
        if self._order is SampleOrder.RANKED and self.done:
            return list(range(num_ranked(self.jobs)))
        if self.first_finish is None or not self.done:
            return list(range(len(self.jobs)))
        return self.first_finish.winners(self._sample_states())

    def _sample_states(self) -> list[SampleState]:
        return [(len(job.sequence.tokens), job.sequence.finish_reason) for job in self.jobs]

    def _resolve_seed(self) -> int:
        resumed, seed = self.segment.seed, self.params.seed
        if resumed is not None and seed not in (None, resumed):
            raise InvalidRequestError(
                f"seed is {seed}, but resume has seed {resumed}; leave seed out when resuming"
            )
        if seed is None:
            seed = resumed
        return fresh_seed() if seed is None else seed

    def _samples(self, decoder: Decoder, constraint: object) -> list[UnfinishedSample]:
        """Validate segments and first_finish, and return the samples that this call runs."""
        segment, count = self.segment, self.params.n
        if self.first_finish is not None and self.first_finish.first > count:
            first = self.first_finish.first
            raise InvalidRequestError(f"first_finish is {first}, but there are {count} samples")
        if segment.tokens or segment.resume is not None:
            is_exact = decoder.exactness == "token-exact"
            others = (constraint is None, self.first_finish is None, not self.params.banned_strings)
            if not all(others) or not is_exact:
                raise UnsupportedCombinationError(
                    "segment and resume need a token-exact decoder, and do not work with"
                    " constraints, banned_strings or first_finish"
                )
        samples = segment.samples(count, self.resources.model.spec.vocab_size)
        if any(sample.tokens and len(sample.tokens) >= self.limit for sample in samples):
            raise InvalidRequestError(
                f"resume: a sample already has {self.limit} tokens; raise max_tokens to continue it"
            )
        return samples

    def _resume(self) -> dict[str, Any] | None:
        """The value of `resume` that continues the samples cut off by this segment; None if all
        samples are finished."""
        unfinished = [
            {"number": number, "tokens": list(job.sequence.tokens)}
            for number, job in zip(self._numbers, self.jobs, strict=True)
            if job.sequence.finish_reason == "length" and len(job.sequence.tokens) < self.limit
        ]
        return {"seed": self.seed, "samples": unfinished} if unfinished else None

    def _check(self, decoder: Decoder) -> int:
        """Check that prompt, decoder and parameters fit the model. Returns the token limit."""
        spec = self.resources.model.spec
        if not self.prompt:
            raise InvalidRequestError("the prompt is empty")
        if not decoder.requirements.generates and len(self.prompt) > self.resources.max_length:
            raise ContextLengthError(
                f"This model's maximum context length is {self.resources.max_length} tokens; the"
                f" text has {len(self.prompt)}: shorten it, or set truncate_prompt_tokens"
            )
        is_generated = decoder.requirements.generates and self.params.max_tokens != 0
        if len(self.prompt) + is_generated > self.resources.max_length:
            raise ContextLengthError(
                # Clients find the kind of the error by OpenAI's phrase.
                f"This model's maximum context length is {self.resources.max_length} tokens, of"
                f" which one must be left to generate; the prompt has {len(self.prompt)}: shorten"
                " it"
            )
        if len(self.companion) >= self.resources.max_length:
            raise ContextLengthError(
                f"negative_prompt has {len(self.companion)} tokens, and this model's maximum"
                f" context length is {self.resources.max_length}: shorten it"
            )
        needs = decoder.requirements
        self.resources.check_decoder(self.name, needs)
        check_samples(self.name, needs, self.params, self.first_finish is not None)
        for name in ("banned_strings", "thinking_token_budget"):
            is_set = getattr(self.params, name) not in (None, (), [])
            if is_set and not (spec.causal and needs.can_sample):
                raise UnsupportedCombinationError(
                    f"decoder {self.name!r} does not support {name}: it does not sample from left"
                    " to right"
                )
        if self.prompt_embeds:
            for one in self.prompt_embeds:
                one.check(self.prompt, spec.hidden_size)
            check_disjoint([(one.first, one.stop) for one in self.prompt_embeds])
            if not needs.takes_embeddings:
                raise UnsupportedCombinationError(
                    f"decoder {self.name!r} does not support prompt_embeds; autoregressive,"
                    " quickprefill and mustdrop do"
                )
        if self.params.prompt_logprobs is not None:
            if not spec.causal:
                raise UnsupportedCombinationError(
                    "prompt_logprobs (echo with logprobs) need a causal model"
                )
            if self.prompt_embeds or self.first_finish is not None:
                raise UnsupportedCombinationError(
                    "prompt_logprobs (echo with logprobs) do not work with prompt_embeds or"
                    " first_finish"
                )
        remaining = self.resources.max_length - len(self.prompt)
        return min(
            DEFAULT_TOKENS if self.params.max_tokens is None else self.params.max_tokens, remaining
        )

    def _job(
        self,
        index: int,
        sample: UnfinishedSample,
        decoder: Decoder,
        constraint: Constraint | ConstraintState | None,
        trace: bool,
        priority: int,
    ) -> Job:
        resources, params = self.resources, self.params
        tokenizer, spec = resources.tokenizer, resources.model.spec
        mask = tokenizer.mask_id
        segment = self.segment.tokens or self.limit
        output_processor = self._stop_rules.with_limit(
            min(self.limit, len(sample.tokens) + segment)
        )
        adapter = -1 if self.adapter is None else self.adapter.index
        key = (adapter, self.namespace)
        if params.thinking_token_budget is not None:
            params = self._with_thinking_budget(params.thinking_token_budget)
        sampler = params.sampler(
            self.prompt,
            spec.vocab_size,
            tokenizer.eos_ids,
            constraint=None if constraint is None else self._constraint_state(constraint),
            geometry=resources.geometry if params.needs_geometry else None,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )
        if self._has_companion and not sampler.companions:
            raise InvalidRequestError(
                "negative_prompt has no effect without guidance; set guidance_scale"
            )
        draft_states = resources.draft_states(decoder.requirements)
        sequence = Sequence(
            prompt=self.prompt,
            sampler=sampler,
            tokenizers=dict(resources.tokenizers),
            noise=Noise(self.seed, stream_id(sample.number)),
            stop_checker=output_processor,
            open_kv_cache=lambda runner, tokens: resources.open_kv_cache(runner, tokens, key),
            pool_of=resources.pool_of,
            companion_prompts=[self.companion] * sampler.companions,
            compute_logprobs=self._compute_logprobs if params.logprobs is not None else None,
            adapter=adapter,
            priority=priority,
            mask_token=mask if mask is not None and mask < spec.vocab_size else None,
            num_layers=spec.num_layers,
            namespace=self.namespace,
            shares_prefix=resources.prefix_cache,
            trace=[] if trace else None,
            cost_model=resources.cost_model,
            draft_policy=resources.draft_policy,
            prediction=(
                None if self.prediction is None else Prediction(self.prompt, self.prediction)
            ),
            draft_states=draft_states,
            optional_runners=resources.optional_runners(decoder.requirements),
            draft_runners=resources.draft_runners(decoder.requirements),
            always_drafts=DRAFT in decoder.requirements.runners or decoder.requirements.every_draft,
            repeats_drafts=decoder.exactness != "token-exact",
        )
        if self.prompt_embeds:
            sequence.state[PROMPT_EMBEDS] = self.prompt_embeds
        if sampler.learns_from_logits:
            if self.segment.tokens or sample.tokens:
                raise UnsupportedCombinationError("mirostat does not support segment and resume")
            if params.banned_strings:
                raise UnsupportedCombinationError("mirostat does not support banned_strings")
        if sample.tokens:
            _restore(sequence, output_processor, sample.tokens)
        inner = decoder
        decoder = validate_and_retry(decoder, self.constraint, tokenizer, spec.vocab_size)
        if self._order is SampleOrder.RANKED and decoder is not inner:
            raise UnsupportedCombinationError(
                f"n is {params.n}, but this constraint is checked while decoder {self.name!r} runs:"
                " it finds one text"
            )
        if params.banned_strings:
            ignore_case = params.banned_strings_ignore_case
            decoder = BannedStrings(decoder, params.banned_strings, ignore_case, tokenizer)
        decoder.prepare(sequence)
        if self.limit == 0 and decoder.requirements.generates:
            decoder = EmptyDecoder()
        if params.prompt_logprobs is not None and index == 0:  # the same for every sample
            decoder = PromptLogprobsDecoder(decoder, params.prompt_logprobs)
        return Job(
            sequence,
            decoder,
            on_finish=lambda job: self._finished(index),
            on_progress=lambda job: self._progressed(index),
        )

    def _constraint_state(self, constraint: Constraint | ConstraintState) -> ConstraintState:
        """The initial state of a constraint. A constraint state is forked."""
        if isinstance(constraint, Constraint):
            size = self.resources.model.spec.vocab_size
            return constraint.start_with_limit(self.resources.tokenizer, size, self.limit)
        if not hasattr(constraint, "mask"):
            raise InvalidRequestError(
                f"constraint is a {type(constraint).__name__}; use JsonSchema, Regex, Grammar,"
                " Choice or Predicate"
            )
        return constraint.fork()

    def _with_thinking_budget(self, budget: int) -> SamplingParams:
        """The sampling parameters with a processor that limits the reasoning."""
        tokenizer = self.resources.tokenizer
        words = vocabulary(tokenizer, self.resources.model.spec.vocab_size)
        may_call = isinstance(self.constraint, ToolCalls)
        processor = ThinkingBudget(
            budget,
            words,
            tokenizer.decode(self.prompt[-64:], skip_special=False),
            next_message=next_message(tokenizer, words, may_call=may_call),
            may_call=may_call,
        )
        processors = [*self.params.logits_processors, processor]
        return replace(self.params, logits_processors=processors)

    def _compute_logprobs(self, logits: np.ndarray, token: int, sampler: Sampler) -> TokenLogprobs:
        count = self.params.logprobs or 0
        if self.params.processed_logprobs:
            return distribution_logprobs(sampler.distribution_of(logits, token), token, count)
        return token_logprobs(logits, token, count)

    def _token_text(self, token: int) -> str:
        """The text of a single token. Bytes of incomplete characters become U+FFFD; a special token
        is given by its name."""
        tokenizer = self.resources.tokenizer
        if tokenizer.is_special(token):
            return tokenizer.token_text(token)
        return tokenizer.token_bytes(token).decode(errors="replace")

    def _progressed(self, number: int) -> None:
        if self._first_token_times[number] is None and self.jobs[number].sequence.tokens:
            self._note_first_tokens(number, perf_counter())
        self._cancel_losers()
        self._notify()

    def _note_first_tokens(self, number: int, time: float) -> None:
        self._first_token_times[number] = time
        self._num_first_tokens[number] = len(self.jobs[number].sequence.tokens)

    def _cancel_losers(self) -> None:
        """Cancel the samples that can no longer finish first. Runs on the engine's thread."""
        if self.first_finish is not None:
            for number in self.first_finish.lost(self._sample_states()):
                self.resources.engine.cancel(self.jobs[number])

    def _finished(self, number: int) -> None:
        self._end_times[number] = end_time = perf_counter()
        if self._first_token_times[number] is None:
            self._note_first_tokens(number, end_time)
        try:
            self._cancel_losers()
            self._order.proceed(self.jobs, number, self.resources.engine)
        finally:
            self._notify()

    def _notify(self) -> None:
        if self._on_progress is not None:
            try:
                self._on_progress()
            except Exception:  # for example a closed event loop; other requests must not suffer
                log.exception("a request's callback failed")

    def _output_processor(self, number: int) -> OutputProcessor:
        output_processor = self.jobs[number].sequence.stop_checker
        assert isinstance(output_processor, OutputProcessor)
        return output_processor

    def _sample(self, number: int) -> Generation:
        job = self.jobs[number]
        sequence = job.sequence
        # Another thread may see that the job is done before `_finished` is called.
        end_time = self._end_times[number] or perf_counter()
        first_token_time = self._first_token_times[number] or end_time
        prediction = sequence.prediction
        ranked = self.jobs[0].sequence.state.get(RANKED)
        stats = Stats(
            passes=sequence.num_passes,
            rows=sequence.num_rows,
            num_tokens=len(sequence.tokens),
            num_prompt_tokens=len(self.prompt),
            seconds=end_time - self._start_time,
            time_to_first_token=first_token_time - self._start_time,
            num_cached_tokens=sequence.num_cached_tokens,
            num_accepted_predictions=prediction.num_accepted if prediction else 0,
            num_rejected_predictions=prediction.num_rejected if prediction else 0,
            num_first_tokens=self._num_first_tokens[number],
        )
        return Generation(
            text=self._output_processor(number).text,
            tokens=list(sequence.tokens),
            finish_reason=sequence.finish_reason or "stop",
            seed=self.seed,
            stats=stats,
            decoder=self.name,
            draft_models=self.resources.draft_models(self._needs),
            logprobs=list(sequence.logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
            trace=sequence.trace,
            token_text=self._token_text,
            ignored=list(self.ignored),
            score=ranked[number].score if ranked else None,
            constraint=enforcement_report(self.constraint, sequence) if self.constraint else None,
        )


def _restore(
    sequence: Sequence, output_processor: OutputProcessor, tokens: tuple[int, ...]
) -> None:
    """Restore a sequence to the state that an earlier call left it in."""
    taken, reason = output_processor.push(tokens)
    if reason is not None or taken < len(tokens):
        raise InvalidRequestError("resume: a sample has already finished; leave it out")
    output_processor.take()  # the earlier call has returned this text
    sequence.tokens.extend(tokens)
    sequence.state[RESUMED] = len(tokens)
    if sequence.compute_logprobs is not None:
        sequence.logprobs.extend([None] * len(tokens))
    for token in tokens:
        sequence.sampler.advance(token)

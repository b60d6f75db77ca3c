"""A user's request as jobs for the engine: one per sample."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from anydecode.constraints.constraint import Constraint
from anydecode.decoders.constrained.checked import checked, outcome
from anydecode.decoders.decoder import Decoder
from anydecode.engine.engine import Job
from anydecode.engine.generation import Generation, Piece, Stats
from anydecode.engine.text import StopRules
from anydecode.errors import AnydecodeError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.logprobs import TokenLogprobs, distribution_logprobs, token_logprobs
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.policy import Policy
from anydecode.scoring.noise import Noise, fresh_seed, stream_id
from anydecode.scoring.sequence import Sequence

if TYPE_CHECKING:
    from anydecode.engine.llm import LLM


#: How many tokens an answer may have where nothing is said.
DEFAULT_TOKENS = 256


class Request:
    """Prompt and options, checked; sequences and jobs, made; and the answer, put together."""

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        decoder: Decoder,
        params: SamplingParams,
        *,
        name: str = "",
        constraint: Any = None,
        adapter: int = -1,
        trace: bool = False,
        priority: int = 0,
        namespace: Any = None,
        companion: list[int] | None = None,
    ) -> None:
        self.llm = llm
        self.prompt = prompt
        self.companion = companion or prompt[-1:]
        self.params = params
        self.name = name
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.limit = self._check(decoder)
        self.constraint = constraint if isinstance(constraint, Constraint) else None
        self._began = perf_counter()
        self._first: list[float | None] = [None] * params.n
        self._ended: list[float] = [self._began] * params.n
        self._news: Callable[[], Any] | None = None
        self.jobs = [
            self._job(number, decoder, constraint, adapter, trace, priority, namespace)
            for number in range(params.n)
        ]

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def has_text(self) -> bool:
        """Whether `take_text` would give something."""
        return self._rules(0).has_text

    def take_text(self, number: int = 0) -> str:
        """The text of sample `number` that has become certain since the last call."""
        return self._rules(number).take()

    def notify(self, news: Callable[[], Any]) -> None:
        """Call `news` (on the engine's thread) whenever there are tokens, and at the end."""
        self._news = news

    def last_piece(self) -> Piece:
        """What is left of the text, with the whole answer. Raises what ended the request."""
        generation = self.generation()
        return Piece(self.take_text(), generation)

    def generation(self) -> Generation:
        """The answer. Raises what ended the request, if something did."""
        for job in self.jobs:
            if isinstance(job.error, AnydecodeError):
                raise job.error
            if job.error is not None:
                raise RuntimeError(f"decoder {self.name!r} failed: {job.error!r}") from job.error
        samples = [self._sample(number) for number in range(len(self.jobs))]
        samples[0].samples = samples
        return samples[0]

    def _check(self, decoder: Decoder) -> int:
        """The token limit, once everything that can be refused has been."""
        spec = self.llm.model.spec
        if not self.prompt:
            raise InvalidRequestError("the prompt is empty")
        if len(self.prompt) >= self.llm.max_length:
            raise InvalidRequestError(
                f"the prompt has {len(self.prompt)} tokens; the context holds"
                f" {self.llm.max_length}, and one must be left to say"
            )
        if decoder.causal is not None and decoder.causal != spec.causal:
            kind = "causal" if decoder.causal else "diffusion (bidirectional)"
            raise UnsupportedCombinationError(f"decoder {self.name!r} needs a {kind} model")
        for lane in decoder.lanes:
            if lane not in self.llm.engine.lanes:
                raise UnsupportedCombinationError(
                    f"decoder {self.name!r} needs a {lane} model: LLM(..., {lane}=...)"
                )
        if decoder.lanes and not decoder.translates and not self.llm.shares_vocabulary:
            raise UnsupportedCombinationError(
                f"decoder {self.name!r} needs a draft model with the target's vocabulary;"
                " 'omnidraft' translates between vocabularies"
            )
        room = self.llm.max_length - len(self.prompt)
        return min(
            DEFAULT_TOKENS if self.params.max_tokens is None else self.params.max_tokens, room
        )

    def _job(
        self,
        number: int,
        decoder: Decoder,
        constraint: Any,
        adapter: int,
        trace: bool,
        priority: int,
        namespace: Any,
    ) -> Job:
        llm, params = self.llm, self.params
        tokenizer = llm.tokenizer
        rules = StopRules(
            tokenizer,
            params.stop,
            params.stop_tokens,
            tokenizer.eos_ids,
            self.limit,
            params.ignore_eos,
            params.include_stop,
            params.min_tokens,
        )
        key = (adapter, namespace)
        policy = params.policy(
            self.prompt,
            llm.model.spec.vocab_size,
            tokenizer.eos_ids,
            constraint=None if constraint is None else self._started(constraint),
            geometry=llm.geometry() if params.needs_geometry else None,
        )
        sequence = Sequence(
            prompt=self.prompt,
            policy=policy,
            tokenizers={"target": tokenizer, "draft": llm.draft_tokenizer or tokenizer},
            noise=Noise(self.seed, stream_id(number)),
            listener=rules,
            open_context=lambda lane, tokens: llm.open_context(lane, tokens, key),
            companion_prompts=[self.companion] * policy.companions,
            annotate=self._annotate if params.logprobs is not None else None,
            adapter=adapter,
            priority=priority,
            mask_token=tokenizer.mask_id,
            num_layers=llm.model.spec.num_layers,
            namespace=namespace,
            shares_prefix=llm.prefix_cache,
            trace=[] if trace else None,
            pace=llm.pace,
        )
        decoder = checked(decoder, self.constraint, tokenizer, llm.model.spec.vocab_size)
        decoder.prepare(sequence)
        return Job(
            sequence,
            decoder,
            on_finish=lambda job: self._finished(number),
            on_progress=lambda job: self._progressed(number),
        )

    def _started(self, constraint: Any) -> Any:
        """The state of a constraint at the start of an answer; a bare state is forked."""
        if isinstance(constraint, Constraint):
            assert self.llm.tokenizer is not None
            return constraint.start(self.llm.tokenizer, self.llm.model.spec.vocab_size)
        if not hasattr(constraint, "mask"):
            raise InvalidRequestError(
                f"constraint is a {type(constraint).__name__}; use JsonSchema, Regex, Grammar,"
                " Choice or Predicate"
            )
        return constraint.fork()

    def _annotate(self, logits: np.ndarray, token: int, policy: Policy) -> TokenLogprobs:
        count = self.params.logprobs or 0
        if self.params.processed_logprobs:
            return distribution_logprobs(policy.distribution(logits), token, count)
        return token_logprobs(logits, token, count)

    def _token_text(self, token: int) -> str:
        """A token alone; what is no whole character is U+FFFD, a special token its name."""
        tokenizer = self.llm.tokenizer
        if tokenizer.is_special(token):
            return tokenizer.token_text(token)
        return tokenizer.token_bytes(token).decode(errors="replace")

    def _progressed(self, number: int) -> None:
        if self._first[number] is None:
            self._first[number] = perf_counter()
        if self._news is not None:
            self._news()

    def _finished(self, number: int) -> None:
        self._ended[number] = perf_counter()
        if self._first[number] is None:
            self._first[number] = self._ended[number]
        if self._news is not None:
            self._news()

    def _rules(self, number: int) -> StopRules:
        listener = self.jobs[number].sequence.listener
        assert isinstance(listener, StopRules)
        return listener

    def _sample(self, number: int) -> Generation:
        job = self.jobs[number]
        sequence = job.sequence
        first = self._first[number] or self._ended[number]
        stats = Stats(
            passes=sequence.num_passes,
            num_tokens=len(sequence.tokens),
            num_prompt_tokens=len(self.prompt),
            seconds=self._ended[number] - self._began,
            time_to_first_token=first - self._began,
        )
        return Generation(
            text=self._rules(number).text,
            tokens=list(sequence.tokens),
            finish_reason=sequence.finish_reason or "stop",
            seed=self.seed,
            stats=stats,
            decoder=self.name,
            logprobs=list(sequence.logprobs) if self.params.logprobs is not None else None,
            trace=sequence.trace,
            token_text=self._token_text,
            constraint=outcome(self.constraint, sequence) if self.constraint else None,
        )

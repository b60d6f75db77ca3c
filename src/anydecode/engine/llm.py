"""The front door: a model, an engine around it, and the verbs a user speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Decoder
from anydecode.engine.costs import EngineCostModel
from anydecode.engine.driver import Driver
from anydecode.engine.engine import Engine
from anydecode.engine.first_finish import FirstFinish
from anydecode.engine.generation import Generation, StreamChunk
from anydecode.engine.goodput import ServerGoodput
from anydecode.engine.methods import Methods, build_as, weight_format
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.request import Request
from anydecode.engine.schedule import DecodesFirst, Schedule
from anydecode.engine.scoring import Likelihood, Scoring
from anydecode.engine.segments import Segment
from anydecode.engine.spilling import open_spill, stable_name
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cache import bytes_per_position
from anydecode.kernels.pages import memory_bytes
from anydecode.memory.pool import KVPool, new_cache
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.interface import Model
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.preset import SamplerPreset
from anydecode.sampling.top_w import Geometry
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.sequence import TARGET

Prompt = str | Seq[int]
Messages = Seq[dict[str, Any]]

_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)


class LLM:
    """A language model ready to decode.

    `model` is a name ("smollm2-135m-instruct"), a Hugging Face repo id, a folder, a `.gguf` path,
    an object with the `Model` protocol, or a `transformers` causal model. `dtype` is "float32",
    "bfloat16", "int8", "int4" or None (as stored), for diffusion models also "dlm-ptq" with its
    parameters. `device` is "cpu" (None means it) or "cuda": Triton's kernels where that package is
    there, else torch. `draft` is a smaller model for the methods that want one, in any of those
    forms, or a copy of `model`: "self:int4", "self:layers=10" or both ("self:int4,layers=10").
    `cache` is what keys and values are kept as: "float32", "float16", "bfloat16", "int8", "int4" or
    None (what the backend prefers); texts are equal within one such format. `cache_positions` is
    how many positions the key-value cache holds, over all sequences; `row_budget` how many rows a
    pass may have. `schedule` is a key of the catalogue ("sarathi-serve:budget=256") or an object;
    `drafting` likewise what says how much all requests together may draft ("smartspec-server").
    Shared prefixes of the target that its cache has no room for go to `prefix_spill`: a folder, or
    "memory"; at most `spill_limit` bytes.
    """

    def __init__(
        self,
        model: Any = "smollm2-135m-instruct",
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        threads: int | None = None,
        backend: str | None = None,
        device: str | None = None,
        draft: Any = None,
        cache: str | None = None,
        cache_positions: int | None = None,
        row_budget: int = 512,
        max_running: int = 256,
        prefix_cache: bool = True,
        schedule: str | Schedule | None = None,
        drafting: str | ServerGoodput | None = None,
        prefix_spill: str | Path | None = None,
        spill_limit: str | int = "4GiB",
    ) -> None:
        from anydecode.models.opening import WeightFormat, open_model, open_tokenizer
        from anydecode.models.self_drafts import open_draft

        options: dict[str, Any] = {"threads": threads, "backend": backend, "device": device}
        format = weight_format(dtype)
        self.model, found = open_model(model, dtype=format, **options)
        dtype = format.dtype if isinstance(format, WeightFormat) else format
        given = open_tokenizer(tokenizer) or found
        if given is None:
            raise InvalidRequestError("this model brings no tokenizer; give tokenizer=")
        self.tokenizer: Tokenizer = given
        self._adapters: dict[str, int] = {}
        self.prefix_cache = prefix_cache
        self._positions = cache_positions
        self._cache = cache
        self._row_budget = row_budget
        self.engine = Engine({}, max_running)
        self.driver = Driver(self.engine)
        self.cost_model = EngineCostModel(self.engine, self.model)
        self.draft_tokenizer: Tokenizer = self.tokenizer
        self._geometry: Geometry | None = None
        self.methods = Methods(None if drafting is None else build_as(drafting, ServerGoodput))
        if schedule is not None:
            schedule = build_as(schedule, Schedule)  # type: ignore[type-abstract]
        self.add_lane(TARGET, self.model, schedule)
        if prefix_spill is not None:
            runner = self.engine.runners[TARGET]
            runner.prefixes.namespace_id = stable_name
            runner.prefixes.spill = open_spill(
                prefix_spill, spill_limit, self.model, runner.pool.cache
            )
        if draft is not None:
            small, theirs = open_draft(
                draft, self.model, dtype=dtype, threads=threads, backend=backend
            )
            self.draft_tokenizer = theirs or self.tokenizer
            self.add_lane("draft", small)

    @cached_property
    def shares_vocabulary(self) -> bool:
        """Whether target and draft model mean the same by a token id, as far as both go."""
        ours, theirs = self.tokenizer, self.draft_tokenizer
        count = min(ours.vocab_size, theirs.vocab_size)
        return ours is theirs or all(
            ours.token_bytes(token) == theirs.token_bytes(token)
            for token in range(0, count, max(1, count // 512))
        )

    @property
    def max_length(self) -> int:
        """Most tokens a sequence can have, prompt included."""
        target = self.engine.runners[TARGET]
        return min(self.model.spec.max_positions, target.pool.num_slots)

    def add_lane(self, name: str, model: Model, schedule: Schedule | None = None) -> ModelRunner:
        """Put a further model beside the target, for methods that score in several."""
        format = self._cache
        if name != TARGET and format not in getattr(model, "cache_formats", ()):
            format = None
        positions = self._positions or _default_positions(model, format)
        pool = KVPool(model, positions, format)
        runner = ModelRunner(name, pool, schedule or DecodesFirst(self._row_budget))
        self.engine.runners[name] = runner
        return runner

    def generate(self, prompt: Prompt | Seq[Prompt], **options: Any) -> Any:
        """Complete `prompt`: text, or a list of integers (a tokenised prompt). A list of prompts is
        decoded together and gives a list. Where nothing is said, decoding is greedy.

        Options: `decoder` (a key of the catalogue, "key:name=value", or an object), `sampler` (one
        sampling rule or several, named alike), `constraint`, `max_tokens`, `temperature`, `top_k`,
        `top_p`, `min_p`, `seed`, `stop`, `ignore_eos`, `n`, `logprobs`, `adapter`, `trace`,
        `negative_prompt` (for guidance) and every other field of `SamplingParams`; words in
        `banned_words` may be text. Of `n` samples, `first_finish=k` keeps the k that end first and
        cancels the others. `segment=m` says at most m tokens now; `resume=answer.resume` goes on
        from there. `prompt_embeds` puts embeddings in place of some of the prompt's tokens.
        Returns a `Generation` (`n` > 1: the first; all are in `samples`). Raises
        `InvalidRequestError`."""
        many = _is_batch(prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        requests = [self.request(one, **options) for one in prompts]
        answers = self._finish(requests)
        return answers if many else answers[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[StreamChunk]:
        """Complete `prompt`, text piece by piece; the last piece carries the `Generation`."""
        request = self.request(prompt, **options)
        if len(request.jobs) > 1:
            raise InvalidRequestError("streaming gives one sample; ask for n=1")
        return self._pieces(request)

    def chat(self, messages: Messages, **options: Any) -> Generation:
        """Answer a conversation: dicts with `role` and `content`. Options as for `generate`."""
        answer: Generation = self.generate(self._rendered(messages, options), **options)
        return answer

    def stream_chat(self, messages: Messages, **options: Any) -> Iterator[StreamChunk]:
        """Answer a conversation, piece by piece."""
        return self.stream(self._rendered(messages, options), **options)

    async def agenerate(self, prompt: Prompt | Seq[Prompt], **options: Any) -> Any:
        """`generate` for asyncio; requests of one process share passes."""
        many = _is_batch(prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        requests = [self.request(one, **options) for one in prompts]
        answers = await asyncio.gather(*map(self._afinish, requests))
        return answers if many else answers[0]

    async def achat(self, messages: Messages, **options: Any) -> Generation:
        """`chat` for asyncio."""
        answer: Generation = await self.agenerate(self._rendered(messages, options), **options)
        return answer

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio. Leaving the loop early cancels the generation."""
        loop = asyncio.get_running_loop()
        request = self.request(prompt, **options)
        news = asyncio.Event()
        request.notify(lambda: loop.call_soon_threadsafe(news.set))
        self.start(request)
        try:
            while not request.done:
                await news.wait()
                news.clear()
                if not request.done and (text := request.take_text()):
                    yield StreamChunk(text)
            yield request.last_piece()
        finally:
            self.abandon(request)

    def score(self, prompt: Prompt, continuation: Prompt) -> Likelihood:
        """Log-likelihood of `continuation` after `prompt`, under the model's own logits."""
        return self.scores([(prompt, continuation)])[0]

    def scores(self, pairs: Seq[tuple[Prompt, Prompt]]) -> list[Likelihood]:
        """`score` for many pairs, together."""
        scorings = []
        for prompt, continuation in pairs:
            head, tail = self.encode(prompt), self.encode(continuation, special=False)
            if isinstance(prompt, str) and isinstance(continuation, str):
                whole = self.encode(prompt + continuation)
                head, tail = whole[: len(head)], whole[len(head) :]
            scorings.append(Scoring(head, tail))
        requests = [
            Request(self, scoring.tokens, scoring, SamplingParams(temperature=0.0, max_tokens=1))
            for scoring in scorings
        ]
        self._finish(requests)
        return [scoring.likelihood() for scoring in scorings]

    def encode(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        """Token ids of a prompt, each with an embedding. Raises InvalidRequestError for others."""
        if not isinstance(prompt, Iterable):
            raise InvalidRequestError(f"a prompt is a text or a list of token ids, not {prompt!r}")
        size = self.model.spec.vocab_size
        # A tokenizer may know more tokens than the model has embeddings.
        tokens: Seq[int] = (
            self.tokenizer.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        )
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidRequestError(
                    f"a prompt holds {token!r}; allowed are token ids from 0 to {size - 1}"
                )
            if not 0 <= token < size:
                raise InvalidRequestError(f"token {token} is not in the vocabulary of {size}")
        return [int(token) for token in tokens]

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter (PEFT layout); requests choose it with `adapter=name`."""
        add = getattr(self.model, "add_adapter", None)
        if add is None:
            raise UnsupportedCombinationError("this kind of model takes no adapters")
        self._adapters[name] = add(name, Path(path))

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return sorted(self._adapters)

    def adapter_index(self, name: str | None) -> int:
        """The model's number of adapter `name`; -1 for none."""
        if name is None:
            return -1
        known = self._adapters
        if name not in known:
            have = ", ".join(sorted(known)) or "none is loaded"
            raise InvalidRequestError(f"no adapter is called {name!r} ({have})")
        return known[name]

    def decoder(self, choice: str | Decoder, namespace: Hashable = None) -> Decoder:
        """The decoder a user named: an object, a key, or "key:name=value,name=value". What it
        learns from requests is kept per `namespace`."""
        return self.methods.decoder(choice, namespace)

    @property
    def default_decoder(self) -> str:
        """Who decodes where nothing is said: "auto", or what a diffusion model was made for."""
        spec = self.model.spec
        if spec.causal:
            return "auto"
        return "sdar" if spec.block_size else "dream" if spec.logit_shift else "llada"

    def clear(self) -> None:
        """Forget shared prefixes and what drafters learned from earlier requests."""
        self.methods.clear()
        for runner in self.engine.runners.values():
            runner.prefixes.clear()

    def close(self) -> None:
        """Cancel what runs and stop the engine; prefixes go to the spill, if there is one."""
        self.driver.close()
        for runner in self.engine.runners.values():
            if runner.prefixes.spill is not None:
                runner.prefixes.flush()
                runner.prefixes.spill.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open_context(self, lane_name: str, tokens: list[int], namespace: Any) -> SequenceCache:
        """A context that begins with what the prefix cache has of `tokens` (all but the last)."""
        runner = self.engine.runners[lane_name]
        context = SequenceCache(runner.pool)
        if self.prefix_cache and runner.model.spec.causal:
            held = runner.prefixes.match(tokens[:-1], namespace)
            context.attach_prefix(held, tokens[: len(held)])
            context.num_cached = len(held)
        return context

    def request(
        self,
        prompt: Prompt,
        *,
        decoder: str | Decoder | SamplerPreset | None = None,
        sampler: str | SamplerPreset | Seq[str | SamplerPreset] = (),
        constraint: Any = None,
        adapter: str | None = None,
        trace: bool = False,
        priority: int = 0,
        namespace: Any = None,
        negative_prompt: Prompt | None = None,
        first_finish: int | FirstFinish | None = None,
        segment: int | Segment | None = None,
        resume: dict[str, Any] | None = None,
        prompt_embeds: PromptEmbeds | None = None,
        **sampling: Any,
    ) -> Request:
        """A checked request that has not started yet: what `generate` would run."""
        unknown = sorted(set(sampling) - _SAMPLING)
        if unknown:
            raise InvalidRequestError(f"no option is called {', '.join(unknown)}")
        decoder = decoder or self.default_decoder
        name = decoder if isinstance(decoder, str) else type(decoder).__name__
        rules = [sampler] if isinstance(sampler, str | SamplerPreset) else sampler
        method, chosen, constraint = self.methods.resolve(decoder, rules, constraint, namespace)
        for rule in chosen:
            sampling = rule.apply(sampling)
            if rule.needs_temperature and not method.can_sample:
                raise UnsupportedCombinationError(
                    f"{name} draws nothing: the sampler {rule.key!r} would have no effect"
                )
        sampling.setdefault("temperature", 0.0)
        if isinstance(sampling.get("stop"), str):
            sampling["stop"] = [sampling["stop"]]
        if "banned_words" in sampling:
            words = sampling["banned_words"]
            if not isinstance(words, Seq) or isinstance(words, str):
                raise InvalidRequestError(f"banned_words must be a list of words, not {words!r}")
            sampling["banned_words"] = self._word_tokens(words)
        return Request(
            self,
            self.encode(prompt),
            method,
            SamplingParams(**sampling),
            name=name,
            constraint=constraint,
            adapter=self.adapter_index(adapter),
            trace=trace,
            priority=priority,
            namespace=namespace,
            companion=None if negative_prompt is None else self.encode(negative_prompt),
            first_finish=(
                FirstFinish(first_finish) if isinstance(first_finish, int) else first_finish
            ),
            segment=segment if isinstance(segment, Segment) else Segment(segment or 0, resume),
            prompt_embeds=prompt_embeds,
        )

    def _word_tokens(self, words: Seq[str | Seq[int]]) -> list[Seq[int]]:
        """Words as token ids; a word given as text is meant with and without a space before it."""
        found: list[Seq[int]] = []
        for word in words:
            if isinstance(word, str):
                forms = (word, " " + word)
                found += [self.encode(form, special=False) for form in forms]
            else:
                found.append(word)
        return found

    def geometry(self) -> Geometry:
        """The model's embeddings as top-w wants them."""
        if self._geometry is None:
            embed = getattr(self.model, "embed", None)
            if embed is None:
                raise UnsupportedCombinationError(
                    "top_w needs a model whose embeddings can be read"
                )
            self._geometry = Geometry.of(embed(np.arange(self.model.spec.vocab_size)).numpy())
        return self._geometry

    def start(self, request: Request, *, background: bool = True) -> None:
        """Queue a request. In the background it runs by itself and tells of progress through
        `Request.notify`; else someone must step the engine."""
        if background:
            self.driver.run_in_background()
        for job in request.jobs:
            self.driver.submit(job)

    def abandon(self, request: Request) -> None:
        """Cancel a request and free its memory."""
        for job in request.jobs:
            self.driver.cancel(job)

    def _finish(self, requests: list[Request]) -> list[Generation]:
        for request in requests:
            self.start(request, background=False)
        try:
            self.driver.advance(lambda: all(request.done for request in requests))
        except BaseException:
            for request in requests:
                self.abandon(request)
            raise
        return [request.generation() for request in requests]

    async def _afinish(self, request: Request) -> Generation:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        request.notify(lambda: request.done and loop.call_soon_threadsafe(done.set))
        self.start(request)
        try:
            await done.wait()
        finally:
            self.abandon(request)
        return request.generation()

    def _pieces(self, request: Request) -> Iterator[StreamChunk]:
        self.start(request, background=False)
        try:
            while not request.done:
                self.driver.advance(lambda: request.done or request.has_text)
                if not request.done and (text := request.take_text()):
                    yield StreamChunk(text)
            yield request.last_piece()
        finally:
            self.abandon(request)

    def _rendered(self, messages: Messages, options: dict[str, Any]) -> list[int]:
        variables = options.pop("template_variables", {})
        text = self.tokenizer.render_chat(list(messages), **variables)
        return self.tokenizer.encode(text, special=False)


def _is_batch(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return False
    return any(not isinstance(part, int) for part in prompt)


def _default_positions(model: Model, format: str | None) -> int:
    """As many positions as a quarter of the machine's memory holds, at most 131072 and at least one
    full sequence of up to 8192. Memory that the system does not tell counts as 4 GiB."""
    per_position = bytes_per_position(new_cache(model, 1, format))
    fitting = (memory_bytes() or 4 << 30) // 4 // max(1, per_position)
    wanted = max(16 * 1024, 4 * model.spec.max_positions)
    return max(min(fitting, wanted, 131072), min(model.spec.max_positions, 8192))

"""The user-facing API: loads a model, owns the engine, and turns calls into requests."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, overload

import numpy as np

from anydecode.api.adapters import Adapters, LoadedAdapter
from anydecode.api.embedding import (
    EmbedOptions,
    PooledState,
    RankedDocument,
    RelevanceOptions,
    check_instruction,
    check_top_n,
    cosine_similarity,
    cross_encoder,
    embedding_decoder,
    pair_template,
    pair_tokens,
    pooling_of,
    ranked,
    relevance_decoder,
    text_start,
    text_tokens,
    token_limit,
)
from anydecode.api.first_finish import FirstFinish
from anydecode.api.generation import Generation, StreamChunk
from anydecode.api.methods import Methods, build_as, weight_format
from anydecode.api.options import (
    DEFAULT_TEMPERATURE,
    GenerateOptions,
    Messages,
    Prompt,
    check_names,
    check_options,
    check_positional,
    check_prompt,
    sampling_parameters,
    split_prompts,
    with_parameters,
)
from anydecode.api.prefix_spill import open_spill, parse_bytes, stable_name
from anydecode.api.request import Request
from anydecode.api.resources import Resources
from anydecode.api.sampling_defaults import NONE, missing_defaults, sampling_defaults
from anydecode.api.scoring import Likelihood, LikelihoodDecoder
from anydecode.api.segment_rollout import Segment
from anydecode.api.words import word_tokens
from anydecode.arguments import check_kinds, checked_arguments, is_list
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.smartspec_server import ServerGoodput
from anydecode.engine.costs import EngineCostModel, load_by_threads
from anydecode.engine.driver import Driver
from anydecode.engine.engine import Engine
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.schedule import DecodesFirst, Schedule
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError, quoted
from anydecode.kernels.cache import bytes_per_position
from anydecode.kernels.pages import memory_bytes
from anydecode.memory.pool import KVPool, new_cache
from anydecode.models.encoder_tasks import tasks_of
from anydecode.models.ffn_split import ModelSplit
from anydecode.models.interface import Model
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.banned_words import BannedWordTable
from anydecode.sampling.constrained import ConstraintState
from anydecode.sampling.options import SamplingOptions
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.preset import SamplerPreset
from anydecode.scoring.cost import CostModel
from anydecode.scoring.draft_policy import OWN_DRAFTS
from anydecode.scoring.media import Encoder, Media
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.sequence import DRAFT, FURTHER_DRAFTS, TARGET

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LLM:
    """A language model with an engine that decodes it.

    Use as a context manager, or call `close`.

    Args:
        model: A name ("smollm2-135m-instruct"), a Hugging Face repo id, a folder, a `.gguf` path,
            an object with the `Model` protocol, or a `transformers` causal model. Several `LLM`s
            may have the same object: its passes take turns.
        tokenizer: Replaces the tokenizer that comes with the model.
        dtype: Format of the weights: "float32", "bfloat16", "int8", "int4" or None (as stored); for
            diffusion models also "dlm-ptq" with its parameters.
        threads: Number of CPU threads.
        backend: Name of the kernel backend; by default the best one for the device. "transformers"
            opens a folder or a GGUF file as a model of that package, with fewer guarantees.
        device: "cpu" (the default) or "cuda": Triton kernels if that package is installed, else
            torch.
        family: The family of the model, for checkpoints whose config does not say it
            ("open_dllm"); by default the one that the config names.
        mask: The mask token of a diffusion model; by default the one that its files name, or that
            of the published models of its family.
        block: The block size of a block-diffusion model; by default that of its config, or of the
            published models of its family.
        draft: A smaller model for methods that need one, in any of the forms of `model`, the folder
            of a drafter that reads the states of `model` (EAGLE, DFlash, Medusa, Hydra, modules for
            further tokens), or a copy of `model`: "self:int4", "self:layers=10" or both
            ("self:int4,layers=10"). By default the drafter in this package for `model`, if there is
            one (see `open_shipped_draft`). "none" leaves it out, and the modules in the folder of
            `model` that a method may find there. A list opens several, which methods that route
            between drafters use (`taps`, `online-sd:route=true`); other methods use the first.
        cache: Format of the key-value cache: "float32", "float16", "bfloat16", "int8", "int4" or
            None (the backend's default). Methods that are token-exact give equal texts within one
            format.
        cache_positions: Size of the key-value cache in positions, over all sequences; by default
            as many as fit into `cache_memory`, at most 131072.
        cache_memory: Size of the key-value cache of each model, at most: a number of bytes or a
            text such as "2GiB". By default a quarter of the machine's memory. A cache has room for
            one full sequence of up to 8192 positions in any case.
        row_budget: Maximum number of rows (tokens) per forward pass.
        max_running: Maximum number of sequences that run at the same time.
        prefix_cache: Whether requests may reuse the cached prefixes of earlier ones.
        schedule: A catalogue key ("sarathi-serve:budget=256") or a `Schedule`.
        drafting: What limits how much all requests together draft: a catalogue key or an object
            with such a limit, by default "smartspec-server"; "fixed": each request drafts as much
            as its method says.
        prefix_spill: Where to store prefixes that are evicted from the target's cache: a folder,
            or "memory".
        spill_limit: Maximum size of the spill: a number of bytes or a text such as "4GiB".
        split: A catalogue key ("step-3") or object that runs parts of the model's passes in other
            processes.
        generation_config: Where `sampling_defaults` come from: "auto" for the model's files, a
            folder with a `generation_config.json` or such a file, or "none" (the default). The
            end-of-text tokens in the model's files end a text in any case.

    Attributes:
        finds_draft: Whether the first request of a method that drafts with a module of the model's
            own checkpoint (`mtp`) opens it; see `open_own_draft`.
        sampling_defaults: Sampling options of requests that do not set them, by name.
        has_shipped_draft: Whether the draft model is the drafter that comes with this package.
        image_encoder: The encoder of images in prompts; None: prompts have no images.

    Raises:
        ModelNotFoundError: If there is no such model.
        CheckpointError: If the model's files cannot be used.
        InvalidRequestError: If a parameter is invalid.
    """

    #: What `request` returns.
    request_type: ClassVar[type[Request]] = Request
    image_encoder: Encoder | None = None

    def __init__(
        self,
        model: Any = "smollm2-135m-instruct",
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        threads: int | None = None,
        backend: str | None = None,
        device: str | None = None,
        family: str | None = None,
        mask: int | None = None,
        block: int | None = None,
        draft: Any = None,
        cache: str | None = None,
        cache_positions: int | None = None,
        cache_memory: str | int | None = None,
        row_budget: int = 512,
        max_running: int = 256,
        prefix_cache: bool = True,
        schedule: str | Schedule | None = None,
        drafting: str | ServerGoodput = "smartspec-server",
        prefix_spill: str | Path | None = None,
        spill_limit: str | int = "4GiB",
        split: str | ModelSplit | None = None,
        generation_config: str | Path | None = None,
    ) -> None:
        from anydecode.models.opening import (
            WeightFormat,
            fitted_tokenizer,
            open_model,
            open_tokenizer,
        )
        from anydecode.models.self_drafts import open_draft, open_own_draft, open_shipped_draft

        if prefix_spill is not None and not prefix_cache:
            raise InvalidRequestError(
                "prefix_spill stores prefixes of the cache, and prefix_cache is False: set one"
            )
        options: dict[str, Any] = {"threads": threads, "backend": backend, "device": device}
        format = weight_format(dtype)
        if split is not None:
            split = build_as(split, ModelSplit)  # type: ignore[type-abstract]
        self.model, model_tokenizer = open_model(
            model, dtype=format, family=family, block=block, split=split, **options
        )
        dtype = format.dtype if isinstance(format, WeightFormat) else format
        self.sampling_defaults = sampling_defaults(self.model, generation_config)
        opened = open_tokenizer(tokenizer, self.model) or model_tokenizer
        if opened is None:
            raise InvalidRequestError(
                f"{self.model.name} has no tokenizer, which is needed to read and write text: add"
                " tokenizer.json (or tokenizer.model, or vocab.json and merges.txt) to its folder,"
                " or in Python pass tokenizer="
            )
        self.tokenizer: Tokenizer = fitted_tokenizer(opened, self.model.spec, mask)
        self._adapters = Adapters(self.model)
        self._positions = cache_positions
        self._cache_bytes = None if cache_memory is None else parse_bytes(cache_memory)
        self._cache = cache
        self._row_budget = row_budget
        self.engine = Engine({}, max_running)
        self.driver = Driver(self.engine)
        self.methods = Methods()
        if schedule is not None:
            schedule = build_as(schedule, Schedule)  # type: ignore[type-abstract]
        self.add_runner(TARGET, self.model, schedule)
        if prefix_spill is not None:
            runner = self.engine.runners[TARGET]
            runner.prefixes.namespace_id = stable_name
            runner.prefixes.spill = open_spill(
                prefix_spill, spill_limit, self.model, runner.pool.cache
            )
        drafts = list(draft) if isinstance(draft, list | tuple) else [draft]
        self.finds_draft, self._draft_lock = "none" not in drafts, threading.Lock()
        self._own_draft = partial(
            open_own_draft, self.model, dtype=dtype, threads=threads, backend=backend
        )
        tokenizers = {TARGET: self.tokenizer, DRAFT: self.tokenizer}
        shipped = None
        if draft is None:
            shipped = open_shipped_draft(self.model, threads=threads, backend=backend)
            if shipped is not None:
                self.add_runner(DRAFT, shipped)
        self.has_shipped_draft = shipped is not None
        for number, one in enumerate(one for one in drafts if one not in (None, "none")):
            name = f"{DRAFT}-{number + 1}" if number else DRAFT
            draft_model, draft_tokenizer = open_draft(
                one, self.model, dtype=dtype, threads=threads, backend=backend
            )
            self.add_runner(name, draft_model)
            tokenizers[name] = draft_tokenizer or self.tokenizer
        self.resources = Resources(
            self.engine,
            tokenizers,
            EngineCostModel(self.engine, self.model),
            OWN_DRAFTS if drafting == "fixed" else build_as(drafting, ServerGoodput).unused(),
            prefix_cache,
        )

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence, prompt included."""
        return self.resources.max_length

    @property
    def cost_model(self) -> CostModel:
        """Costs of passes and the load of the engine; may be replaced."""
        return self.resources.cost_model

    @cost_model.setter
    def cost_model(self, cost_model: CostModel) -> None:
        self.resources = replace(self.resources, cost_model=cost_model)

    def open_own_draft(self) -> None:
        """Open the module of the model's own checkpoint that predicts further tokens as the draft
        model, if there is one and there is no other draft model."""
        with self._draft_lock:
            if DRAFT not in self.engine.runners:
                module = self._own_draft()
                if module is not None:
                    self.add_runner(DRAFT, module)

    def add_runner(self, name: str, model: Model, schedule: Schedule | None = None) -> ModelRunner:
        """Add a model runner to the engine, for methods that use several models, and those of the
        draft model's further modules."""
        format = self._cache
        if name != TARGET and format not in getattr(model, "cache_formats", ()):
            format = None
        positions = self._positions
        if positions is None:
            positions = _default_positions(model, format, self._cache_bytes)
        pool = KVPool(model, positions, format)
        runner = ModelRunner(name, pool, schedule or DecodesFirst(self._row_budget))
        if runner.schedule.has_prompt_stream:
            runner.divide()
            if runner.prompts is not None and runner.model.executor.threads > 2:  # type: ignore[attr-defined]
                costs = load_by_threads(runner.model)
                runner.thread_cost = None if costs is None else costs.seconds
        self.engine.runners = {**self.engine.runners, name: runner}  # others may be reading it
        if name == DRAFT:
            further: Seq[Model] = getattr(model, "further", ())
            for other, module in zip(FURTHER_DRAFTS, further, strict=False):
                self.add_runner(other, module)
        return runner

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Seq[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Seq[Prompt], *others: object, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """Complete a prompt, or a batch of prompts, which are decoded together.

        Args:
            prompt: A text, a list of token ids, or a list of these.
            **options: See `GenerateOptions`. Decoding is greedy by default.

        Returns:
            A `Generation`, or a list of them for a batch. With `n` > 1 it is the first sample; all
            are in `samples`.

        Raises:
            InvalidRequestError: If an option is unknown or invalid, or the prompt does not fit.
            UnsupportedCombinationError: If options do not work together or with this model.
            OutOfMemoryError: If the key-value cache is too small for the request.
        """
        check_positional(others)
        requests, is_batch = self._requests(prompt, options)
        generations = self._run(requests)
        return generations if is_batch else generations[0]

    def stream(
        self, prompt: Prompt, *others: NoReturn, **options: Unpack[GenerateOptions]
    ) -> Generator[StreamChunk, None, None]:
        """Complete `prompt` and yield text as it is generated.

        Args:
            prompt: A text or a list of token ids.
            **options: See `GenerateOptions`; `n` must be 1.

        Returns:
            An iterator over chunks of text. The last chunk carries the `Generation`. Closing the
            iterator early cancels the generation.

        Raises:
            InvalidRequestError: As `generate`, before the first chunk.
        """
        check_positional(others)
        return self._stream(self._streamed_request(prompt, options))

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Seq[Messages],
        *,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    def chat(
        self,
        messages: Messages | Seq[Messages],
        *others: object,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation | list[Generation]:
        """Answer a conversation, or a batch of conversations, with the model's chat template.

        Args:
            messages: Dicts with `role` and `content`, or a list of such conversations, which are
                answered together.
            template_variables: Further variables of the template, such as `enable_thinking`.
            **options: See `GenerateOptions`.

        Returns:
            The answer, or a list of answers for a batch.

        Raises:
            InvalidRequestError: As `generate`, or if the model has no chat template.
        """
        check_positional(others)
        return self.generate(self._render_chats(messages, template_variables), **options)

    def stream_chat(
        self,
        messages: Messages,
        *others: NoReturn,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[StreamChunk, None, None]:
        """`chat` as a stream of text chunks; arguments and errors as there, results as `stream`."""
        check_positional(others)
        return self.stream(self._render_chat(messages, template_variables), **options)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    async def agenerate(
        self, prompt: Seq[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    async def agenerate(
        self, prompt: Prompt | Seq[Prompt], *others: object, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """`generate` for asyncio. Concurrent requests share forward passes; cancelling the task
        cancels the generation."""
        check_positional(others)
        requests, is_batch = self._requests(prompt, options)
        generations = await self._arun(requests)
        return generations if is_batch else generations[0]

    async def astream(
        self, prompt: Prompt, *others: NoReturn, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[StreamChunk, None]:
        """`stream` for asyncio. Leaving the loop early cancels the generation."""
        check_positional(others)
        loop = asyncio.get_running_loop()
        request = self._streamed_request(prompt, options)
        has_progress = asyncio.Event()
        request.notify(lambda: loop.call_soon_threadsafe(has_progress.set))
        self.start(request)
        try:
            while not request.done:
                await has_progress.wait()
                has_progress.clear()
                if not request.done and (text := request.take_text()):
                    yield StreamChunk(text)
            yield request.last_chunk()
        finally:
            self.abandon(request)

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    async def achat(
        self,
        messages: Seq[Messages],
        *,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    async def achat(
        self,
        messages: Messages | Seq[Messages],
        *others: object,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation | list[Generation]:
        """`chat` for asyncio."""
        check_positional(others)
        return await self.agenerate(self._render_chats(messages, template_variables), **options)

    def astream_chat(
        self,
        messages: Messages,
        *others: NoReturn,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[StreamChunk, None]:
        """`stream_chat` for asyncio."""
        check_positional(others)
        return self.astream(self._render_chat(messages, template_variables), **options)

    def score(self, prompt: Prompt, continuation: Prompt) -> Likelihood:
        """Log-likelihood of `continuation` after `prompt`, under the model's unmodified logits.

        Args:
            prompt: A text or a list of token ids.
            continuation: The same. Two texts are tokenized as one.

        Returns:
            The log-likelihood in nats: in total, and by token.

        Raises:
            InvalidRequestError: If one of them is empty, or both together are too long.
        """
        return self.scores([(prompt, continuation)])[0]

    def scores(self, pairs: Seq[tuple[Prompt, Prompt]]) -> list[Likelihood]:
        """`score` for a batch of (prompt, continuation) pairs, which are scored together."""
        decoders = self._likelihoods(pairs)
        self._run([self.measurement(decoder, decoder.tokens) for decoder in decoders])
        return [decoder.likelihood() for decoder in decoders]

    async def ascore(self, prompt: Prompt, continuation: Prompt) -> Likelihood:
        """`score` for asyncio."""
        return (await self.ascores([(prompt, continuation)]))[0]

    async def ascores(self, pairs: Seq[tuple[Prompt, Prompt]]) -> list[Likelihood]:
        """`scores` for asyncio."""
        decoders = self._likelihoods(pairs)
        await self._arun([self.measurement(decoder, decoder.tokens) for decoder in decoders])
        return [decoder.likelihood() for decoder in decoders]

    @overload
    def embed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: Prompt, **options: Unpack[EmbedOptions]
    ) -> list[float]: ...

    @overload
    def embed(self, prompt: Seq[Prompt], **options: Unpack[EmbedOptions]) -> list[list[float]]: ...

    def embed(
        self, prompt: Prompt | Seq[Prompt], **options: Unpack[EmbedOptions]
    ) -> list[float] | list[list[float]]:
        """Embedding of a text, or of a batch of texts.

        How the states of a text are pooled, and whether the result is scaled to length 1, is read
        from the model's repository (`modules.json`). Without it the embedding is their mean, scaled
        to length 1.

        Args:
            prompt: A text, a list of token ids, or a list of these.
            **options: See `EmbedOptions`.

        Returns:
            The embedding, `[hidden_size]` or `[dimensions]`, or a list of them for a batch.

        Raises:
            InvalidRequestError: If a text is empty or too long, or there is no such adapter,
                prompt or task, or the embeddings may not be cut.
        """
        prompts, is_batch = split_prompts(prompt)
        requests, decoders = self._embeddings(prompts, options)
        self._run(requests)
        vectors = [decoder.vector(options.get("dimensions")) for decoder in decoders]
        return vectors if is_batch else vectors[0]

    @overload
    async def aembed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: Prompt, **options: Unpack[EmbedOptions]
    ) -> list[float]: ...

    @overload
    async def aembed(
        self, prompt: Seq[Prompt], **options: Unpack[EmbedOptions]
    ) -> list[list[float]]: ...

    async def aembed(
        self, prompt: Prompt | Seq[Prompt], **options: Unpack[EmbedOptions]
    ) -> list[float] | list[list[float]]:
        """`embed` for asyncio."""
        prompts, is_batch = split_prompts(prompt)
        requests, decoders = self._embeddings(prompts, options)
        await self._arun(requests)
        vectors = [decoder.vector(options.get("dimensions")) for decoder in decoders]
        return vectors if is_batch else vectors[0]

    def relevance(
        self, query: str, documents: Seq[str], **options: Unpack[RelevanceOptions]
    ) -> list[float]:
        """Relevance of each document to a query.

        A cross-encoder reads query and document together. An embedding model gives the cosine of
        the angle between their embeddings, with the prompts "query" and "document" of its
        repository if it has them.

        Args:
            query: A text.
            documents: Texts.
            **options: See `RelevanceOptions`.

        Returns:
            One number per document.

        Raises:
            InvalidRequestError: If a text is empty or too long.
            UnsupportedCombinationError: If the model is neither of these two.
        """
        requests, scores = self._relevances(query, documents, options)
        self._run(requests)
        return scores()

    async def arelevance(
        self, query: str, documents: Seq[str], **options: Unpack[RelevanceOptions]
    ) -> list[float]:
        """`relevance` for asyncio."""
        requests, scores = self._relevances(query, documents, options)
        await self._arun(requests)
        return scores()

    def rerank(
        self,
        query: str,
        documents: Seq[str],
        *,
        top_n: int | None = None,
        **options: Unpack[RelevanceOptions],
    ) -> list[RankedDocument]:
        """The documents in the order of their `relevance` to a query, the most relevant first.

        Args:
            query: A text.
            documents: Texts.
            top_n: The number of documents that are returned; None for all.
            **options: See `RelevanceOptions`.

        Returns:
            The index and the relevance of each document; equal ones in the order of the list.

        Raises:
            InvalidRequestError: As `relevance`, or if `top_n` is less than 1.
        """
        check_top_n(top_n)
        return ranked(self.relevance(query, documents, **options), top_n)

    async def arerank(
        self,
        query: str,
        documents: Seq[str],
        *,
        top_n: int | None = None,
        **options: Unpack[RelevanceOptions],
    ) -> list[RankedDocument]:
        """`rerank` for asyncio."""
        check_top_n(top_n)
        return ranked(await self.arelevance(query, documents, **options), top_n)

    def encode(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: A text or token ids.
            special: Whether the tokenizer adds special tokens (such as beginning of text).

        Raises:
            InvalidRequestError: If a token id is not in the model's vocabulary.
        """
        return self._encode("the prompt", prompt, special)

    def _encode(self, name: str, prompt: Prompt, special: bool = True) -> list[int]:
        """`encode` of the prompt called `name`."""
        check_prompt(name, prompt)
        size = self.model.spec.vocab_size
        # A tokenizer may have more tokens than the model has embeddings.
        tokens: Seq[int] = (
            self.tokenizer.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        )
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidRequestError(
                    f"{name} contains {quoted(token)}; allowed are token ids from 0 to {size - 1}"
                )
            if not 0 <= token < size:
                raise InvalidRequestError(f"token {token} is not in the vocabulary of {size}")
        return [int(token) for token in tokens]

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter in PEFT layout from the folder `path`, also while requests run.
        Requests select it with `adapter=name`.

        Raises:
            InvalidRequestError: There is already an adapter of this name.
            UnsupportedCombinationError: The model does not support adapters.
            CheckpointError: The files are missing or corrupt, or do not fit the model.
        """
        self._adapters.add(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that use it end as they would; then its weights are freed.

        Raises:
            AdapterNotFoundError: There is no adapter of this name.
        """
        self._adapters.remove(name)

    def embedding_adapter(self, adapter: str | None, task: str | None) -> LoadedAdapter | None:
        """The adapter of an embedding, for `measurement`: the one of this name, or that of a task
        of the model. It stays as it is while it is referred to, whatever is removed or added.

        Raises:
            InvalidRequestError: There is no such task, or both are given.
            AdapterNotFoundError: There is no adapter of this name.
        """
        return self._adapters.of_embedding(adapter, task)

    @property
    def tasks(self) -> list[str]:
        """The tasks of the model for embeddings (`embed(task=)`), sorted."""
        return sorted(tasks_of(self.model))

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, sorted."""
        return self._adapters.names

    @property
    def adapter_paths(self) -> dict[str, Path]:
        """Folders of the loaded adapters, by name."""
        return self._adapters.paths

    @checked_arguments()
    def decoder(self, choice: str | Decoder, namespace: Hashable = None) -> Decoder:
        """The decoder that `choice` names: an object, a catalogue key, or
        "key:name=value,name=value". What it learns from requests is stored per `namespace`."""
        return self.methods.decoder(choice, namespace)

    @property
    def default_decoder(self) -> str:
        """The decoder for requests without one: "auto", or the method that a diffusion model was
        trained for, with the parameters that it was published with."""
        spec = self.model.spec
        if spec.causal:
            return "auto"
        if spec.decoder is not None:
            return spec.decoder
        return "sdar" if spec.block_size else "dream" if spec.logit_shift else "llada"

    def clear(self) -> None:
        """Drop cached prefixes and what drafters have learned from earlier requests."""
        self.methods.clear()
        for runner in self.engine.runners.values():
            runner.prefixes.clear()

    def close(self) -> None:
        """Cancel all requests and stop the engine. Cached prefixes are written to the spill, if
        there is one. Does nothing in a fork of the process, whose locks may be held for ever."""
        if self.driver.is_fork:
            return
        self.driver.close()
        for runner in self.engine.runners.values():
            if runner.prefixes.spill is not None:
                runner.prefixes.flush()
                runner.prefixes.spill.close()
        end_split = getattr(self.model, "end_split", None)
        if end_split is not None:
            end_split()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def request(
        self,
        prompt: Prompt,
        *,
        decoder: str | Decoder | SamplerPreset | Constraint | None = None,
        sampler: str | SamplerPreset | Seq[str | SamplerPreset] = (),
        constraint: str | Constraint | ConstraintState | None = None,
        adapter: str | None = None,
        trace: bool = False,
        priority: int = 0,
        namespace: Hashable = None,
        negative_prompt: Prompt | None = None,
        first_finish: int | FirstFinish | None = None,
        segment: int | Segment | None = None,
        resume: Mapping[str, Any] | None = None,
        prompt_embeds: PromptEmbeds | Seq[PromptEmbeds | Media] | None = None,
        prediction: Prompt | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Request:
        """Validate the options of `generate` and return the request without starting it.

        The keywords are those of `GenerateOptions`.

        Args:
            prompt: A text or a list of token ids.

        Returns:
            The request, for `start`.

        Raises:
            InvalidRequestError: If an option is unknown or invalid, or the prompt does not fit.
        """
        check_names(sampling)
        kinds = {
            "sampler": sampler, "constraint": constraint, "adapter": adapter, "trace": trace,
            "namespace": namespace, "first_finish": first_finish, "segment": segment,
            "resume": resume, "prompt_embeds": prompt_embeds,
        }  # fmt: skip
        check_kinds(kinds, GenerateOptions)
        # A schedule compares priorities, also with those of other requests.
        if not isinstance(priority, Real) or priority != priority:
            raise InvalidRequestError(f"priority must be a number, not {quoted(priority)}")
        given: dict[str, Any] = {**sampling}
        blocks = [prompt_embeds] if isinstance(prompt_embeds, PromptEmbeds) else prompt_embeds or []
        embeds = [one for one in blocks if not isinstance(one, Media)]
        if len(embeds) < len(blocks):
            raise UnsupportedCombinationError(
                "prompt_embeds has images, which need the encoder of a fleet of workers"
                " (FleetLLM): give PromptEmbeds"
            )
        decoder = decoder or ("autoregressive" if embeds else self.default_decoder)
        name = decoder if isinstance(decoder, str) else type(decoder).__name__
        samplers = [sampler] if isinstance(sampler, str | SamplerPreset) else sampler
        method, presets, text_constraint = self.methods.resolve(
            decoder, samplers, constraint, namespace
        )
        if method.requirements.finds_draft and self.finds_draft:
            self.open_own_draft()
        for preset in presets:
            given = preset.apply(given)
            if preset.needs_temperature and not method.requirements.can_sample:
                raise UnsupportedCombinationError(
                    f"{name} does not sample: the sampler {preset.key!r} would have no effect"
                )
        defaults = missing_defaults(given, self.sampling_defaults)
        given |= defaults
        given.setdefault("temperature", DEFAULT_TEMPERATURE)
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        if "banned_words" in given:
            words = given["banned_words"]
            if not isinstance(words, Seq) or isinstance(words, str):
                raise InvalidRequestError(f"banned_words must be a list of words, not {words!r}")
            if not isinstance(words, BannedWordTable):
                given["banned_words"] = word_tokens(self.tokenizer, words)
        create = partial(
            self.request_type,
            self.resources,
            self.encode(prompt),
            method,
            name=name,
            constraint=text_constraint,
            adapter=self._adapters.find(adapter),
            trace=trace,
            priority=priority,
            namespace=namespace,
            companion=(
                None
                if negative_prompt is None
                else self._encode("negative_prompt", negative_prompt)
            ),
            first_finish=(
                FirstFinish(first_finish) if isinstance(first_finish, int) else first_finish
            ),
            segment=segment if isinstance(segment, Segment) else Segment(segment or 0, resume),
            prompt_embeds=embeds,
            prediction=(
                None
                if prediction is None
                else self._encode("prediction", prediction, special=False)
            ),
        )
        try:
            request = create(SamplingParams(**given))
        except InvalidRequestError as error:
            own = {key: value for key, value in given.items() if key not in defaults}
            raise _with_source(error, create, own, defaults) from None
        request.sampling_defaults = defaults
        return request

    def measurement(
        self,
        decoder: Decoder,
        tokens: list[int],
        adapter: LoadedAdapter | None = None,
        namespace: Hashable = None,
    ) -> Request:
        """A request whose decoder reads `tokens` and generates nothing, not started.

        Args:
            decoder: The decoder, which has the result when the request is done.
            tokens: Token ids.
            adapter: One of `embedding_adapter`.
            namespace: Cached prefixes are shared only within a namespace.

        Raises:
            InvalidRequestError: The tokens do not fit.
        """
        return Request(
            self.resources,
            tokens,
            decoder,
            SamplingParams(temperature=0.0, max_tokens=1),
            name=type(decoder).__name__,
            adapter=adapter,
            namespace=namespace,
        )

    def start(self, request: Request, *, background: bool = True) -> None:
        """Queue a request. With `background`, a thread steps the engine and reports progress
        through `Request.notify`; else the caller must step it."""
        if background:
            self.driver.run_in_background()
        for job in request.first_jobs:
            self.driver.submit(job)

    def abandon(self, request: Request) -> None:
        """Cancel a request and free its memory."""
        for job in request.jobs:
            self.driver.cancel(job)

    def _run(self, requests: list[Request]) -> list[Generation]:
        for request in requests:
            self.start(request, background=False)
        try:
            self.driver.advance(lambda: all(request.done for request in requests))
        except BaseException:
            for request in requests:
                self.abandon(request)
            raise
        return [request.generation() for request in requests]

    async def _arun(self, requests: list[Request]) -> list[Generation]:
        return await asyncio.gather(*map(self._arun_one, requests))

    async def _arun_one(self, request: Request) -> Generation:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        request.notify(lambda: request.done and loop.call_soon_threadsafe(done.set))
        self.start(request)
        try:
            await done.wait()
        finally:
            self.abandon(request)
        return request.generation()

    def _stream(self, request: Request) -> Generator[StreamChunk, None, None]:
        self.start(request, background=False)
        try:
            while not request.done:
                self.driver.advance(lambda: request.done or request.has_text)
                if not request.done and (text := request.take_text()):
                    yield StreamChunk(text)
            yield request.last_chunk()
        finally:
            self.abandon(request)

    def _requests(
        self, prompt: Prompt | Seq[Prompt], options: GenerateOptions
    ) -> tuple[list[Request], bool]:
        """One request per prompt, and whether `prompt` is a batch."""
        prompts, has_many = split_prompts(prompt)
        return [self.request(one, **options) for one in prompts], has_many

    def _streamed_request(self, prompt: Prompt, options: GenerateOptions) -> Request:
        request = self.request(prompt, **options)
        if len(request.jobs) > 1:
            raise InvalidRequestError(f"n is {len(request.jobs)}; streaming allows only n=1")
        return request

    def _likelihoods(self, pairs: Seq[tuple[Prompt, Prompt]]) -> list[LikelihoodDecoder]:
        self.resources.check_decoder("score", LikelihoodDecoder.requirements)
        if not is_list(pairs) or not all(is_list(pair) and len(pair) == 2 for pair in pairs):
            raise InvalidRequestError(
                f"pairs is {quoted(pairs)}; it must be a list of (prompt, continuation) tuples"
            )
        decoders = []
        for prompt, continuation in pairs:
            head = self.encode(prompt)
            tail = self._encode("the continuation", continuation, special=False)
            if isinstance(prompt, str) and isinstance(continuation, str):
                whole = self.encode(prompt + continuation)
                head, tail = whole[: len(head)], whole[len(head) :]
                if continuation and not tail:
                    raise InvalidRequestError(
                        f"the continuation {continuation[:40]!r} has no tokens of its own: both"
                        " texts together have no more tokens than the prompt; begin it with a"
                        " space, or end the prompt where a word ends"
                    )
            decoders.append(LikelihoodDecoder(head, tail))
        return decoders

    def _embeddings(
        self, prompts: Seq[Prompt], options: EmbedOptions
    ) -> tuple[list[Request], list[PooledState]]:
        """One request and decoder per prompt."""
        check_options(options, EmbedOptions)
        pooling = pooling_of(self.model)
        pooling.check_dimensions(options.get("dimensions"), self.model.spec.hidden_size)
        task = options.get("task")
        start = text_start(self.model, options.get("prompt_name"), task)
        limit = token_limit(options.get("truncate_prompt_tokens"), self.max_length)
        loaded = self.embedding_adapter(options.get("adapter"), task)
        decoders = [embedding_decoder(self.model, task) for _ in prompts]
        requests = []
        for decoder, one in zip(decoders, prompts, strict=True):
            if isinstance(one, str):
                [tokens] = text_tokens(self.tokenizer, [start + one], limit)
            else:
                tokens = self.encode(one)[:limit]
            requests.append(self.measurement(decoder, self.encode(tokens), loaded))
        return requests, decoders

    @checked_arguments()
    def _relevances(
        self, query: str, documents: Seq[str], options: RelevanceOptions
    ) -> tuple[list[Request], Callable[[], list[float]]]:
        """The requests that compute the relevance of documents, and a function that returns it when
        they are done."""
        check_options(options, RelevanceOptions)
        reranker = cross_encoder(self.model)
        adapter, length = options.get("adapter"), options.get("truncate_prompt_tokens")
        instruction = options.get("instruction")
        if reranker is None:
            pooling = pooling_of(self.model)
            requests, decoders = [], []
            for texts, kind in (([query], "query"), (list(documents), "document")):
                name = kind if kind in pooling.prompts else None
                part, found = self._embeddings(
                    texts,
                    {"prompt_name": name, "adapter": adapter, "truncate_prompt_tokens": length},
                )
                requests += part
                decoders += found
            check_instruction(instruction)

            def similarities() -> list[float]:
                first, *others = [decoder.vector() for decoder in decoders]
                return [cosine_similarity(first, other) for other in others]

            return requests, similarities
        limit, loaded = token_limit(length, self.max_length), self._adapters.find(adapter)
        requests, judges = [], []
        pairs = [(query, document) for document in documents]
        template = pair_template(reranker)
        for tokens, types in pair_tokens(self.tokenizer, template, pairs, instruction, limit):
            judges.append(relevance_decoder(reranker, types))
            requests.append(self.measurement(judges[-1], self.encode(tokens), loaded))
        return requests, lambda: [judge.score() for judge in judges]

    def _render_chats(
        self, messages: Messages | Seq[Messages], variables: Mapping[str, Any] | None
    ) -> list[int] | list[list[int]]:
        """The prompt of a conversation, or those of a batch of them."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
            raise _no_conversation(messages)
        conversations: Any = list(messages)
        if not conversations or isinstance(conversations[0], Mapping):
            return self._render_chat(conversations, variables)
        return [self._render_chat(one, variables) for one in conversations]

    def _render_chat(self, messages: Messages, variables: Mapping[str, Any] | None) -> list[int]:
        self.resources.check_generates()
        rendered: list[Any] = list(messages) if isinstance(messages, Iterable) else [messages]
        if not all(isinstance(one, Mapping) for one in rendered):
            raise _no_conversation(messages)
        check_kinds({"template_variables": variables}, LLM.chat)
        if variables and "messages" in variables:
            raise InvalidRequestError(
                "template_variables has messages, which are those of the conversation: leave it out"
            )
        text = self.tokenizer.render_chat(rendered, **(variables or {}))
        return self.tokenizer.encode(text, special=False)


def _with_source(
    error: InvalidRequestError,
    create: Callable[[SamplingParams], Request],
    own: dict[str, Any],
    defaults: Mapping[str, float],
) -> InvalidRequestError:
    """`error` of a request, which says where `defaults` come from if there is none without them.
    `own` are the other sampling options."""
    try:
        create(SamplingParams(**{"temperature": DEFAULT_TEMPERATURE, **own}))
    except InvalidRequestError:
        return error
    options = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return type(error)(
        f"{error}; the model's generation settings recommend {options}, which"
        f" generation_config={NONE!r} (--generation-config {NONE}) leaves out"
    )


def _no_conversation(given: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{quoted(given)} is no conversation: pass a list of messages, such as"
        ' [{"role": "user", "content": "Hello"}], or a list of such lists'
    )


# `help` and notebooks show every option with its default.
with_parameters(LLM.request, sampling_parameters())
_OPTIONS = [
    parameter
    for parameter in inspect.signature(LLM.request).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
]
for _method in (
    LLM.generate,
    LLM.stream,
    LLM.chat,
    LLM.stream_chat,
    LLM.agenerate,
    LLM.astream,
    LLM.achat,
    LLM.astream_chat,
):
    with_parameters(_method, _OPTIONS)


def _default_positions(model: Model, format: str | None, num_bytes: int | None) -> int:
    """The default size of the key-value cache, in positions: `num_bytes`, or a quarter of the
    machine's memory; at most 131072 positions, and at least one full sequence of up to 8192. If the
    system does not report its memory, 4 GiB are assumed."""
    per_position = bytes_per_position(new_cache(model, 1, format))
    fitting = (num_bytes or (memory_bytes() or 4 << 30) // 4) // max(1, per_position)
    useful = max(16 * 1024, 4 * model.spec.max_positions)
    return max(min(fitting, useful, 131072), min(model.spec.max_positions, 8192))

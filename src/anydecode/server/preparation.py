"""The expensive preparation of requests: constraints, conversations and long prompts.

A constraint is compiled in a worker process first (see `server.workers`). What passed is compiled
in this process, on a thread, by libraries that limit their work and release the interpreter lock;
the results of the other steps are taken over from the worker. Accepted constraints are kept, so
that each is tried once.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from anydecode.api.embedding import pair_tokens, text_tokens
from anydecode.api.llm import LLM
from anydecode.api.words import word_table
from anydecode.constraints.byte_cache import ByteCache, allocated_bytes, measured_bytes
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.guidance_engine import tokenizer_binding
from anydecode.errors import InvalidRequestError
from anydecode.models.chat import SlowTemplateError, time_limit
from anydecode.models.yes_no import JudgePrompt
from anydecode.sampling.banned_words import BannedWordTable
from anydecode.server import jobs
from anydecode.server.images import read_images
from anydecode.server.jobs import Compiled, Limits, TokenTable
from anydecode.server.settings import Settings
from anydecode.server.workers import worker_pool

#: Longer prompts, in characters, are not tokenised on the event loop.
LONG_TEXT = 16384
#: To encode a word takes as long as so many characters of a long text.
_WORD_LENGTH = 256
#: Maximum size of the accepted constraints that are kept, in bytes.
MAX_ACCEPTED_BYTES = 64 << 20
#: Maximum size of the kinds of conversations that are remembered, in bytes.
_MAX_KIND_BYTES = 1 << 20
#: Longest time, in seconds, that a conversation is rendered on the event loop.
_MAX_INLINE_SECONDS = 0.05
#: The memory of a constraint as Python objects, in bytes per byte of its pickle.
_BYTES_PER_PICKLED_BYTE = 8


class Preparation:
    """Prepares the requests of one server."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        assert llm.tokenizer is not None
        self._tokenizer = llm.tokenizer
        self._vocab_size = llm.model.spec.vocab_size
        self._max_tokens = llm.max_length
        self._limits = Limits(settings.prepare_seconds, settings.prepare_memory)
        self._tokens: TokenTable | None = None
        self._tokens_lock = threading.Lock()
        self._accepted: ByteCache[bytes, Constraint] = ByteCache(MAX_ACCEPTED_BYTES)
        #: The constraints that are being compiled: set when that ends, whether or not it succeeds.
        self._compiling: dict[bytes, asyncio.Event] = {}
        #: The kinds of conversations that a worker process has rendered.
        self._rendered: ByteCache[str, bool] = ByteCache(_MAX_KIND_BYTES)
        #: Whether the worker processes can run the tokenizer. They cannot import one of another
        #: package or of a script; its methods run on a thread of this process.
        self._is_shared = type(llm.tokenizer).__module__.startswith("anydecode.")
        self._pool = worker_pool()

    def warm(self) -> None:
        """Start the worker processes, read the vocabulary and prepare it for constraints, so that
        no request waits for it."""
        self._pool.start()
        self._token_table()
        if self._tokenizer.eos_ids:  # else there are no constraints
            tokenizer_binding(self._tokenizer, self._vocab_size)

    def _token_table(self) -> TokenTable:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = TokenTable(self._tokenizer)
            return self._tokens

    async def constraint(self, state: dict[str, Any], make: Callable[[], Constraint]) -> Constraint:
        """The constraint that `make` returns, compiled: once if several requests want it at once.

        Args:
            state: The `state` of the ASGI scope.
            make: Makes the constraint; a partial of a function that can be imported.

        Raises:
            ConstraintError: The constraint is invalid or cannot be enforced.
            LimitError: Its compilation passes a limit.
        """
        key = _digest(make)
        while (running := self._compiling.get(key)) is not None:
            await running.wait()
        ended = self._compiling[key] = asyncio.Event()
        try:
            return await self._compiled(state, make, key)
        finally:
            del self._compiling[key]
            ended.set()

    async def _compiled(
        self, state: dict[str, Any], make: Callable[[], Constraint], key: bytes
    ) -> Constraint:
        """The constraint that `make` returns, compiled; `key` identifies it."""
        accepted = self._accepted.get(key)
        if accepted is not None and accepted.is_warm(self._tokenizer, self._vocab_size):
            return accepted
        job = (jobs.compile_constraint, (self._vocab_size, make, self._max_tokens))

        def finish(compiled: Compiled | None) -> Constraint:
            constraint = accepted if compiled is None else compiled.constraint
            assert constraint is not None
            allocated = allocated_bytes()
            hints = constraint.completion_hints
            if hints is not None and compiled is not None and compiled.shortest is not None:
                hints.shortest[self._tokenizer] = compiled.shortest
            constraint.warm(self._tokenizer, self._vocab_size)
            if compiled is not None:
                size = measured_bytes(allocated, _BYTES_PER_PICKLED_BYTE * compiled.size)
                self._accepted.put(key, constraint, size)
            return constraint

        constraint: Constraint = await self._pool.run(
            _client(state),
            self._limits,
            "the constraint",
            self._tokens or await asyncio.to_thread(self._token_table),
            job if accepted is None else None,
            finish,
        )
        return constraint

    async def render(
        self, state: dict[str, Any], messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str:
        """A conversation, rendered with the chat template.

        A short conversation is rendered here if a worker process has rendered one with the same
        roles and variables before, and there again if it takes long.
        """
        if not self._is_shared:
            return await asyncio.to_thread(self._tokenizer.render_chat, messages, **variables)
        length, kind = text_length((messages, variables)), _kind(messages, variables)
        if length <= LONG_TEXT and kind in self._rendered:
            try:
                with time_limit(_MAX_INLINE_SECONDS):
                    return self._tokenizer.render_chat(messages, **variables)
            except (SlowTemplateError, MemoryError):
                pass
        text: str = await self._run(state, "the conversation", jobs.render, messages, variables)
        self._rendered.put(kind, True, len(kind))
        return text

    async def encode(self, state: dict[str, Any], text: str, *, special: bool) -> list[int]:
        """Token ids of a text."""
        if len(text) <= LONG_TEXT:
            return self._tokenizer.encode(text, special=special)
        if not self._is_shared:
            return await asyncio.to_thread(self._tokenizer.encode, text, special=special)
        tokens = await self._run(state, "the prompt", jobs.encode, text, special)
        result: list[int] = tokens.tolist()
        return result

    async def images(self, state: dict[str, Any], files: Sequence[bytes]) -> list[np.ndarray]:
        """The pixels of image files, uint8 `[height, width, 3]` each."""
        if not files:
            return []
        if not self._is_shared:
            return await asyncio.to_thread(read_images, self._tokenizer, files)
        pixels: list[np.ndarray] = await self._run(state, "the images", read_images, files)
        return pixels

    async def word_table(
        self, state: dict[str, Any], words: Sequence[str | Sequence[int]]
    ) -> BannedWordTable:
        """Words as `banned_words`, see `api.words.word_table`."""
        length = sum(_WORD_LENGTH + len(word) for word in words)
        table: BannedWordTable = await self._with_tokenizer(state, length, word_table, words)
        return table

    async def text_tokens(
        self, state: dict[str, Any], texts: Sequence[str], max_tokens: int | None
    ) -> list[list[int]]:
        """Token ids of texts, see `api.embedding.text_tokens`."""
        found: list[list[int]] = await self._tokens_of(state, text_tokens, texts, max_tokens)
        return found

    async def pair_tokens(
        self,
        state: dict[str, Any],
        template: JudgePrompt | None,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None,
        max_tokens: int | None,
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids and types of pairs of texts, see `api.embedding.pair_tokens`."""
        found: list[tuple[list[int], list[int]]] = await self._tokens_of(
            state, pair_tokens, template, pairs, instruction, max_tokens
        )
        return found

    async def _tokens_of(
        self, state: dict[str, Any], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        return await self._with_tokenizer(state, text_length(arguments), function, *arguments)

    async def _with_tokenizer(
        self, state: dict[str, Any], length: int, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """The result of `function(tokenizer, *arguments)`; not on the event loop for texts of a
        large `length`."""
        if length <= LONG_TEXT:
            return function(self._tokenizer, *arguments)
        if not self._is_shared:
            return await asyncio.to_thread(function, self._tokenizer, *arguments)
        return await self._run(state, "the texts", function, *arguments)

    async def _run(
        self, state: dict[str, Any], what: str, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        return await self._pool.run(
            _client(state), self._limits, what, self._tokenizer, (function, arguments)
        )


def _client(state: dict[str, Any]) -> Hashable:
    """The tenant by whom requests take turns: an API key, or an address without keys."""
    return state["namespace"] or state["client"]


def _kind(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The roles and fields of the messages and the names of the variables, as text."""
    fields = {(message["role"], *sorted(message)) for message in messages}
    return repr((sorted(fields), sorted(variables)))


def text_length(value: Any) -> int:
    """The number of characters, or values of other types, in nested lists and dicts."""
    length, stack = 0, [value]
    while stack and length <= LONG_TEXT:
        node = stack.pop()
        length += len(node) if isinstance(node, str) else 1
        if isinstance(node, dict):
            stack += [*node, *node.values()]
        elif isinstance(node, (list, tuple)):
            stack += node
    return length


def _digest(make: Callable[[], Constraint]) -> bytes:
    try:
        return hashlib.sha256(pickle.dumps(make)).digest()
    except RecursionError:
        raise InvalidRequestError("the constraint is nested too deep: use fewer levels") from None

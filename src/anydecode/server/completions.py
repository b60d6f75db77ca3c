"""The endpoints `/v1/completions` and `/v1/fim/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from anydecode.api.generation import Generation
from anydecode.api.request import Request
from anydecode.models.fill_in import find_sentinels
from anydecode.server import logprobs
from anydecode.server.errors import ApiError
from anydecode.server.events import DONE, EventStream, encode_event
from anydecode.server.large import build, json_response
from anydecode.server.options import effective_temperature, engine_options
from anydecode.server.prompts import prompt_list
from anydecode.server.protocol import CompletionRequest, FillInRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, canvas, chunk_usage, extension, usage
from anydecode.server.tools import constraint_factory, constraint_field, with_field

#: OpenAI's default for `max_tokens`.
DEFAULT_TOKENS = 16


async def complete(service: Service, body: CompletionRequest, http: HttpRequest) -> Response:
    """Generate the continuation of one prompt or several, as one response or as a stream."""
    return await _complete(service, body, http, DEFAULT_TOKENS, _CompletionAnswer)


async def fill_in(service: Service, body: FillInRequest, http: HttpRequest) -> Response:
    """Generate the text between a prompt and a suffix, as one response or as a stream. Without
    `max_tokens`, the context length is the limit."""
    return await _complete(service, body, http, service.llm.max_length, _FillInAnswer)


async def _complete(
    service: Service,
    body: CompletionRequest,
    http: HttpRequest,
    default_tokens: int,
    form: type[_CompletionAnswer],
) -> Response:
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    options["max_tokens"] = default_tokens if body.max_tokens is None else body.max_tokens
    options["logprobs"] = body.logprobs
    options["prompt_logprobs"] = max(
        (count for count in (body.logprobs if body.echo else None, body.prompt_logprobs)
         if count is not None),
        default=None,
    )  # fmt: skip
    logprobs.check_prompt_logprobs(body)
    if _is_ranked(body, service):
        _check_best_of(body)
        options["n"] = body.best_of
        options["logprobs"] = body.logprobs or 0
    make_constraint = constraint_factory(body.response_format, body.structured_outputs)
    if make_constraint is not None:
        with with_field(constraint_field(body.structured_outputs)):
            options["constraint"] = await service.preparation.constraint(state, make_constraint)
    prompts = prompt_list(body.prompt)
    if body.suffix:
        if body.echo:
            raise ApiError(400, "echo and suffix cannot be combined: leave one out", param="suffix")
        prompts, ends = await with_suffix(service, state, prompts, body.suffix)
        options["stop_tokens"] = [*(body.stop_tokens or ()), *ends]
    run = await service.run(prompts, options, state, streamed=body.stream)
    answer = form(service, body, run)
    if body.stream:
        return EventStream(run, answer.chunks(), service.settings.stall_seconds)
    async with run:
        generations = await run.wait_for_generations(http.receive)
    return await json_response(run.num_values, lambda: answer.response(generations))


async def with_suffix(
    service: Service, state: dict[str, Any], prompts: list[Any], suffix: str
) -> tuple[list[Any], list[int]]:
    """The prompts of the gaps between `prompts` and `suffix`, and the tokens that end a gap."""
    tokenizer = service.tokenizer
    sentinels = await asyncio.to_thread(find_sentinels, tokenizer)  # reads the vocabulary once
    if sentinels is None:
        raise ApiError(
            400,
            "suffix needs a fill-in-the-middle model, and the served model has none of the known"
            " tokens for it; leave suffix out",
            param="suffix",
        )
    encode = service.preparation.encode
    after = await encode(state, suffix, special=False)
    filled = []
    for prompt in prompts:
        before = await encode(state, prompt, special=True) if isinstance(prompt, str) else prompt
        filled.append(sentinels.prompt(before, after, tokenizer.bos_id))
    return filled, sorted({*sentinels.ends, *sentinels.infill_tokens})


def _is_ranked(body: CompletionRequest, service: Service) -> bool:
    """Whether `best_of` selects among more samples than `n`. At temperature 0 all samples are
    equal."""
    if body.best_of in (None, body.n or 1):
        return False
    return effective_temperature(body, service.llm) != 0


def _check_best_of(body: CompletionRequest) -> None:
    assert body.best_of is not None
    if body.best_of < (body.n or 1):
        message = f"best_of is {body.best_of}; it must be at least n ({body.n})"
        raise ApiError(400, message, param="best_of")
    if body.stream or body.first_finish is not None or body.resume is not None:
        message = "best_of above n cannot be combined with stream, first_finish or resume"
        raise ApiError(400, message, param="best_of")


def _mean_logprob(generation: Generation) -> float:
    entries = logprobs.require_all(generation.logprobs or [])
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


class _CompletionAnswer:
    """Builds the response object, or the chunks of its stream."""

    RESPONSE = CHUNK = "text_completion"
    ID_PREFIX = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, run: ServerRun) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._num_logprobs_sent = [0] * len(run.choices)
        self._lists: dict[int, logprobs.CompletionLogprobs] = {}
        self._num_passes_sent = [0] * len(run.choices)

    def response(self, generations: list[Generation]) -> dict[str, Any]:
        """The response object of finished generations, without streaming."""
        choices = []
        for number, index in enumerate(self._selected(generations)):
            text = self._echo(index) + generations[index].text
            choices.append(
                self._choice(number, text, self._new_logprobs(index), self._finish_reason(index))
                | self._prompt_logprobs(index)
            )
        return {
            **self.service.head(self.RESPONSE, self.ID_PREFIX, self.body.model),
            "choices": choices,
            "usage": usage(self.run),
            "anydecode": extension(generations, self.service.tokenizer, self.body),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of the stream."""
        head = self.service.head(self.CHUNK, self.ID_PREFIX, self.body.model)
        stream_options = self.body.stream_options
        await self.run.wait_for_progress()
        choices = self.run.choices  # from now on constant: `first_finish` is not streamed
        active = set(range(len(choices)))
        echoes = [self._echo(index) for index in sorted(active)]
        while active:
            for index in sorted(active):
                request, number = choices[index]
                job = request.jobs[number]
                ended = job.done
                if self._needs_prompt_logprobs(request):
                    continue
                if ended and job.error is not None:
                    request.generation()  # raises the error
                text = echoes[index] + request.take_text(number)
                echoes[index] = ""
                entries = self._new_logprobs(index) if text or ended else None
                reason = self._finish_reason(index) if ended else None
                positions, self._num_passes_sent[index] = canvas(
                    job.sequence.trace, self._num_passes_sent[index], self.service.tokenizer
                )
                extra: dict[str, Any] = {} if positions is None else {"canvas": positions}
                if ended:
                    active.discard(index)
                    if not active:
                        extra |= await build(
                            self.run.num_values,
                            lambda: extension(
                                self.run.generations(), self.service.tokenizer, self.body
                            ),
                        )
                if text or ended or extra:
                    choice = self._choice(index, text, entries, reason)
                    fields = {"anydecode": extra} if extra else {}
                    counts = chunk_usage(self.run, stream_options)
                    yield encode_event({**head, **counts, "choices": [choice], **fields})
            if active:
                await self.run.wait_for_progress()
        if stream_options is not None and stream_options.include_usage:
            yield encode_event({**head, "choices": [], "usage": usage(self.run)})
        yield DONE

    def _choice(self, index: int, text: str, entries: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": entries, "finish_reason": reason}

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """The field with the log-probabilities of the prompt's tokens, if the request asks for
        it."""
        if self.body.prompt_logprobs is None:
            return {}
        entries = self.run.choices[index][0].prompt_logprobs
        return {"prompt_logprobs": logprobs.prompt_entries(entries, self.service.tokenizer)}

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.run.choices[index][0].prompt
        return self.service.tokenizer.decode(prompt)

    def _selected(self, generations: list[Generation]) -> list[int]:
        """Indices of the samples that are returned: all, or the best `n` of each prompt."""
        count = len(generations)
        if not _is_ranked(self.body, self.service):
            return list(range(count))
        size = count // len(self.run.requests)
        means = [_mean_logprob(one) for one in generations]
        ranked = [
            sorted(range(start, start + size), key=means.__getitem__, reverse=True)
            for start in range(0, count, size)
        ]
        return [index for best in ranked for index in best[: self.body.n or 1]]

    def _needs_prompt_logprobs(self, request: Request) -> bool:
        """Whether the prompt's log-probabilities, which sample 0 computes, are not available
        yet."""
        is_requested = self.body.echo and self.body.logprobs is not None
        return bool(is_requested) and request.prompt_logprobs is None and not request.jobs[0].done

    def _new_logprobs(self, index: int) -> dict[str, list[Any]] | None:
        """Log-probabilities of the tokens since the last call; the first call starts with the
        prompt's."""
        if self.body.logprobs is None:
            return None
        request, number = self.run.choices[index]
        # The stop token has an entry, as in OpenAI's and vLLM's completions: clients that score a
        # text (lm-eval) count on one entry per generated token.
        entries = logprobs.generated(
            request.jobs[number].sequence, self._num_logprobs_sent[index], with_stop=True
        )
        self._num_logprobs_sent[index] += len(entries)
        if index in self._lists:
            return self._lists[index].for_tokens(entries)
        lists_of_choice = logprobs.CompletionLogprobs(self.service.tokenizer, self._echo(index))
        self._lists[index] = lists_of_choice
        lists = lists_of_choice.for_tokens(entries)
        if (prompt_entries := request.prompt_logprobs) is not None:
            prompt_lists = lists_of_choice.for_prompt(request.prompt, prompt_entries)
            lists = {name: prompt_lists[name] + values for name, values in lists.items()}
        return lists

    def _finish_reason(self, index: int) -> str:
        request, number = self.run.choices[index]
        return request.jobs[number].sequence.finish_reason or "stop"


class _FillInAnswer(_CompletionAnswer):
    """An answer of `/v1/fim/completions`: its text is a message, as in Mistral's API, with the
    log-probabilities of a chat."""

    RESPONSE, CHUNK = "chat.completion", "chat.completion.chunk"
    ID_PREFIX = "fim"

    def _choice(self, index: int, text: str, entries: Any, reason: str | None) -> dict[str, Any]:
        part = "delta" if self.body.stream else "message"
        message = {"role": "assistant", "content": text}
        return {"index": index, part: message, "logprobs": entries, "finish_reason": reason}

    def _new_logprobs(self, index: int) -> dict[str, list[Any]] | None:
        """Log-probabilities of the tokens since the last call, without the prompt's."""
        if self.body.logprobs is None:
            return None
        request, number = self.run.choices[index]
        entries = logprobs.generated(request.jobs[number].sequence, self._num_logprobs_sent[index])
        self._num_logprobs_sent[index] += len(entries)
        return {"content": logprobs.chat_entries(entries, self.service.tokenizer)}

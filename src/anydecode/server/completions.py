"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.engine.generation import Generation
from anydecode.engine.request import Request
from anydecode.server import logprobs
from anydecode.server.errors import ApiError
from anydecode.server.events import DONE, EventStream, data
from anydecode.server.options import engine_options
from anydecode.server.prompts import prompt_list
from anydecode.server.protocol import CompletionRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, canvas, extension, usage
from anydecode.server.tools import format_constraint, format_schema

#: OpenAI's own limit where a request names none.
DEFAULT_TOKENS = 16


async def complete(service: Service, body: CompletionRequest, http: HttpRequest) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    state = http.scope["state"]
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    options["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    options["logprobs"] = body.logprobs
    if body.echo:
        options["prompt_logprobs"] = body.logprobs
    if _is_ranked(body):
        _check_best_of(body)
        options["n"] = body.best_of
        options["logprobs"] = body.logprobs or 0
    constrain = None
    if format_schema(body.response_format) is not None:

        def constrain() -> Any:
            return format_constraint(body.response_format)

    prompts = prompt_list(body.prompt)
    run = await service.run(prompts, options, state, constrain=constrain, streamed=body.stream)
    answer = _Answer(service, body, run)
    if body.stream:
        return EventStream(run, answer.chunks(), service.settings.stall_seconds)
    async with run:
        generations = await run.finished(http.receive)
    return JSONResponse(answer.whole(generations))


def _is_ranked(body: CompletionRequest) -> bool:
    """Whether more samples are drawn than answered. At temperature 0 they would all be the same."""
    return body.best_of not in (None, body.n or 1) and body.temperature != 0


def _check_best_of(body: CompletionRequest) -> None:
    assert body.best_of is not None
    if body.best_of < (body.n or 1):
        message = f"best_of is {body.best_of}, less than n ({body.n}); make it n or more"
        raise ApiError(400, message, param="best_of")
    if body.stream or body.first_finish is not None or body.resume is not None:
        message = "best_of above n goes without stream, first_finish and resume"
        raise ApiError(400, message, param="best_of")


def _mean_logprob(generation: Generation) -> float:
    notes = logprobs.present(generation.logprobs or [])
    return sum(note.logprob for note in notes) / max(1, len(notes))


class _Answer:
    """The answer in OpenAI's shape, in one piece or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, run: ServerRun) -> None:
        self.service = service
        self.body = body
        self.run = run
        self._noted = [0] * len(run.choices)
        self._lists: dict[int, logprobs.CompletionLists] = {}
        self._traced = [0] * len(run.choices)

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """The answer of a request that did not ask for a stream."""
        choices = []
        for position, index in enumerate(self._kept(generations)):
            text = self._echo(index) + generations[index].text
            choices.append(self._choice(position, text, self._notes(index), self._reason(index)))
        return {
            **self.service.head("text_completion", "cmpl"),
            "choices": choices,
            "usage": usage(self.run),
            "anydecode": extension(generations, self.service.tokenizer, self.body),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        head = self.service.head("text_completion", "cmpl")
        wants_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        shared = {**head, "usage": None} if wants_usage else head
        live = set(range(len(self.run.choices)))
        echoes = [self._echo(index) for index in sorted(live)]
        while live:
            await self.run.news()
            for index in sorted(live):
                request, number = self.run.choices[index]
                job = request.jobs[number]
                ended = job.done
                if self._waits(request):
                    continue
                if ended and job.error is not None:
                    request.generation()  # raises what ended it
                text = echoes[index] + request.take_text(number)
                echoes[index] = ""
                notes = self._notes(index) if text or ended else None
                reason = self._reason(index) if ended else None
                positions, self._traced[index] = canvas(
                    job.sequence.trace, self._traced[index], self.service.tokenizer
                )
                further: dict[str, Any] = {} if positions is None else {"canvas": positions}
                if ended:
                    live.discard(index)
                    if not live:
                        told = extension(self.run.generations(), self.service.tokenizer, self.body)
                        further |= told
                if text or ended or further:
                    choice = self._choice(index, text, notes, reason)
                    told = {"anydecode": further} if further else {}
                    yield data({**shared, "choices": [choice], **told})
        if wants_usage:
            yield data({**head, "choices": [], "usage": usage(self.run)})
        yield DONE

    def _choice(self, index: int, text: str, notes: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": notes, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.run.choices[index][0].prompt
        return self.service.tokenizer.decode(prompt)

    def _kept(self, generations: list[Generation]) -> list[int]:
        """The choices that make the answer: all, or the best `n` of each prompt."""
        count = len(generations)
        if not _is_ranked(self.body):
            return list(range(count))
        size = count // len(self.run.requests)
        means = [_mean_logprob(one) for one in generations]
        ranked = [
            sorted(range(start, start + size), key=means.__getitem__, reverse=True)
            for start in range(0, count, size)
        ]
        return [index for best in ranked for index in best[: self.body.n or 1]]

    def _waits(self, request: Request) -> bool:
        """Whether the prompt's log-probabilities, which sample 0 computes, are yet to come."""
        wanted = self.body.echo and self.body.logprobs is not None
        return bool(wanted) and request.prompt_logprobs is None and not request.jobs[0].done

    def _notes(self, index: int) -> dict[str, list[Any]] | None:
        """Log-probabilities of what has come since the last time, first of all of the prompt's."""
        if self.body.logprobs is None:
            return None
        request, number = self.run.choices[index]
        notes = logprobs.said(request.jobs[number].sequence, self._noted[index])
        self._noted[index] += len(notes)
        if index in self._lists:
            return self._lists[index].of_answer(notes)
        made = logprobs.CompletionLists(self.service.tokenizer, self._echo(index))
        self._lists[index] = made
        lists = made.of_answer(notes)
        if (scored := request.prompt_logprobs) is not None:
            echoed = made.of_prompt(request.prompt, scored)
            lists = {name: echoed[name] + values for name, values in lists.items()}
        return lists

    def _reason(self, index: int) -> str:
        request, number = self.run.choices[index]
        return request.jobs[number].sequence.finish_reason or "stop"

"""A conversation that is being answered: the one form of a request that every chat API is
translated to, and its answer as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from anydecode.api.generation import Generation
from anydecode.api.text import Detokenizer
from anydecode.constraints.tools.stream import Event
from anydecode.constraints.tools.tool_calls import parse_answer
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.server import logprobs
from anydecode.server.errors import ApiError
from anydecode.server.images import ConversationImages
from anydecode.server.options import check_tools, engine_options
from anydecode.server.parsers import Parser
from anydecode.server.prompts import (
    check_continued,
    conversation,
    effort_variables,
    template_of,
    text_of,
    until_mark,
    with_calls,
    with_tools,
)
from anydecode.server.protocol import ChatRequest
from anydecode.server.run import ServerRun
from anydecode.server.service import Service, usage
from anydecode.server.tools import (
    allows_parallel,
    answer_schema_of,
    constraint_factory,
    constraint_field,
    json_options,
    parameters_of,
    select_tools,
    tool_constraint,
    with_field,
)


@dataclass
class ToolCall:
    """A complete call of a tool; `arguments` is JSON text, and `index` counts the calls before."""

    name: str
    arguments: str = ""
    index: int = 0
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


@dataclass
class Answer:
    """A complete answer. `content` and `reasoning` are None if the answer has no such part."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)


async def render(
    service: Service,
    body: ChatRequest,
    state: dict[str, Any],
    images: ConversationImages | None = None,
) -> str:
    """The prompt: the conversation of `body`, rendered with the chat template.

    Args:
        service: The served model.
        body: The request.
        state: The `state` of the ASGI scope.
        images: Gets the images of the conversation; None: it may have none.

    Raises:
        ApiError: The request is invalid, or its last message cannot be continued.
    """
    service.llm.resources.check_generates()
    messages = conversation(body.messages, images)
    is_continued = bool(body.continue_final_message)
    mark = uuid4().hex
    if is_continued:
        check_continued(body, messages)
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + mark}
    tools, _ = select_tools(body.tools, body.tool_choice)
    template = template_of(service.tokenizer, bool(tools))
    check_tools(body.tools or [], template)
    messages = with_calls(messages, template, service.tool_format)
    variables = effort_variables(body.reasoning_effort, template)
    variables.update(body.chat_template_kwargs or {})
    variables["add_generation_prompt"] = (
        body.add_generation_prompt is not False and not is_continued
    )
    if tools and body.tools:
        if service.tool_format is None:
            raise ApiError(
                400,
                "tools need a tool parser, and this server has none; start it with --tool-parser",
                param="tools",
            )
        messages, tool_variables = with_tools(
            messages,
            body.tools,
            template,
            service.tool_format.render([("function", {"argument": "value"})]),
        )
        variables.update(tool_variables)
    text = await service.preparation.render(state, messages, variables)
    return until_mark(text, messages[-1]["content"], mark) if is_continued else text


async def render_tokens(service: Service, body: ChatRequest, state: dict[str, Any]) -> list[int]:
    """The token ids of the prompt that `render` returns."""
    text = await render(service, body, state)
    return await service.preparation.encode(state, text, special=False)


async def start_chat(
    service: Service,
    body: ChatRequest,
    state: dict[str, Any],
    *,
    num_logprobs: int | None = None,
    streamed: bool = False,
) -> ChatRun:
    """Prepare the answer to a conversation: render it, compile its constraint, build the run.

    Args:
        service: The served model.
        body: The request.
        state: The `state` of the ASGI scope.
        num_logprobs: Alternatives whose log-probabilities are recorded per token; None for no
            log-probabilities.
        streamed: Whether the run reports progress after every token.

    Raises:
        ApiError: The request is invalid.
        AnydecodeError: The engine refuses it.
    """
    options = engine_options(body, service.llm, service.settings, state["namespace"])
    limits = (body.max_completion_tokens, body.max_tokens, service.llm.max_length)
    options["max_tokens"] = next(limit for limit in limits if limit is not None)
    options["logprobs"] = num_logprobs
    options["prompt_logprobs"] = body.prompt_logprobs
    tools, required = select_tools(body.tools, body.tool_choice)
    images = service.conversation_images()
    text = await render(service, body, state, images)
    prompt_end = text[-64:]
    if body.continue_final_message:
        prompt_end = service.end_of_partial(text_of(body.messages[-1].content)) or prompt_end
    parse = None
    make_constraint: Callable[[], Any] | None
    if tools:
        assert service.tool_format is not None  # as `render` has checked
        answer_schema = answer_schema_of(body.response_format, body.structured_outputs)
        make_constraint = partial(
            tool_constraint,
            tools,
            service.tool_format,
            required=required,
            parallel=allows_parallel(body.tool_choice, body.parallel_tool_calls),
            answer_schema=answer_schema,
            options=json_options(body.structured_outputs),
        )
        parse = partial(
            parse_answer,
            call_format=service.tool_format,
            schemas=parameters_of(tools),
            has_answer=not required and answer_schema is not None,
            is_required=required,
        )
    else:
        make_constraint = constraint_factory(body.response_format, body.structured_outputs)
    if make_constraint is not None:
        with with_field("tools" if tools else constraint_field(body.structured_outputs)):
            constraint = await service.preparation.constraint(state, make_constraint)
        options["constraint"] = service.after_reasoning(
            constraint, prompt_end, has_tools=bool(tools)
        )
    if images is None:
        tokens = await service.preparation.encode(state, text, special=False)
    else:
        texts = images.split(text)
        pieces = [await service.preparation.encode(state, one, special=False) for one in texts]
        pixels = await service.preparation.images(state, images.files)
        tokens, placed = images.place(pieces, pixels, placeholder=0)
        if placed:
            options["prompt_embeds"] = placed
            if not body.decoder:
                options["decoder"] = "autoregressive"  # as without a server
    run = await service.run([tokens], options, state, streamed=streamed)
    return ChatRun(service, run, partial(service.parser, prompt_end, parse))


class ChatRun:
    """A conversation's run, and the parsers of its answers.

    Args:
        service: The served model.
        run: The run, not started.
        new_parser: Makes a parser of one answer.
    """

    def __init__(self, service: Service, run: ServerRun, new_parser: Callable[[], Parser]) -> None:
        self.service = service
        self.run = run
        self._new_parser = new_parser
        self._parsers = [new_parser() for _ in run.choices]
        self._token_parsers: list[TokenParser | None] = [None] * len(run.choices)
        self._has_calls = [False] * len(run.choices)

    async def stream(self) -> AsyncIterator[tuple[int, list[Event], bool]]:
        """Yield (choice, its new events, whether it has ended) while the run generates.

        The kinds of events are those of `constraints.tools.stream`, and "reasoning".

        Raises:
            Exception: The error that ended a request.
        """
        await self.run.wait_for_progress()
        choices = self.run.choices  # from now on constant: `first_finish` is not streamed
        active = set(range(len(choices)))
        while active:
            for index in sorted(active):
                request, number = choices[index]
                job = request.jobs[number]
                ended = job.done
                if ended:
                    active.discard(index)
                    if job.error is not None:
                        request.generation()  # raises the error
                text, is_cut = request.take_text(number), ended and self._is_cut(index)
                events = list(self._parsers[index].push(text, final=ended, is_cut=is_cut))
                self._note_calls(index, events)
                yield index, events, ended
            if active:
                await self.run.wait_for_progress()

    def events(self, index: int, generation: Generation) -> list[Event]:
        """All events of a finished choice that was not streamed."""
        parser, is_cut = self._parsers[index], self._is_cut(index)
        events = list(parser.push(generation.text, final=True, is_cut=is_cut))
        self._note_calls(index, events)
        return events

    def _is_cut(self, index: int) -> bool:
        """Whether a token limit ended a choice."""
        request, number = self.run.choices[index]
        return request.jobs[number].sequence.finish_reason == "length"

    def answer(self, index: int, generation: Generation) -> Answer:
        """The complete answer of a finished choice that was not streamed."""
        answer = Answer()
        for kind, value in self.events(index, generation):
            if kind == "call":
                answer.calls.append(ToolCall(value, index=len(answer.calls)))
            elif kind == "arguments":
                answer.calls[-1].arguments += value
            elif kind == "content":
                answer.content = (answer.content or "") + value
            elif kind == "reasoning":
                answer.reasoning = (answer.reasoning or "") + value
        return answer

    def finish_reason(self, index: int) -> str:
        """Why a choice ended: "stop", "length" or, if its last call is complete, "tool_calls"; also
        of one that was cancelled."""
        request, number = self.run.choices[index]
        reason = request.jobs[number].sequence.finish_reason or "stop"
        return "tool_calls" if self._has_calls[index] and reason == "stop" else reason

    def stop_string(self, index: int) -> str | None:
        """The stop string that ended a choice, if one did."""
        request, number = self.run.choices[index]
        return request.stop_string(number)

    def usage(self) -> dict[str, Any]:
        """The `usage` object of OpenAI's chat completions."""
        return usage(self.run, self._new_parser)

    def content_logprobs(self, index: int) -> list[tuple[int, TokenLogprobs]]:
        """The log-probabilities of the tokens of the content that are new since the last call, each
        with the number of reasoning blocks and tool calls before it."""
        if self._token_parsers[index] is None:
            self._token_parsers[index] = TokenParser(self.service.tokenizer, self._new_parser())
        parser = self._token_parsers[index]
        assert parser is not None
        request, number = self.run.choices[index]
        job = request.jobs[number]
        parser.push(
            logprobs.generated(job.sequence, parser.num_tokens),
            final=job.done,
            is_cut=job.done and self._is_cut(index),
        )
        return parser.take()

    def _note_calls(self, index: int, events: list[Event]) -> None:
        # A stop string may have cut the last call.
        for kind, _ in events:
            if kind in ("call", "end"):
                self._has_calls[index] = kind == "end"


class TokenParser:
    """Finds the tokens of the content among those of an answer.

    Args:
        tokenizer: The model's tokenizer.
        parser: A new parser of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, parser: Parser) -> None:
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._parser = parser
        #: Tokens that no event has covered yet, with their texts: these may be parts of tags.
        self._pending: list[tuple[TokenLogprobs, str]] = []
        self._content: list[tuple[int, TokenLogprobs]] = []
        self._num_others = 0
        self._kind = "content"

    def push(self, entries: list[TokenLogprobs], *, final: bool, is_cut: bool = False) -> None:
        """Parse the next tokens. `final`: whether they are the last ones, and `is_cut`, whether of
        an answer that was cut."""
        self.num_tokens += len(entries)
        for entry in entries:
            text = self._detokenizer.push(entry.token)
            self._pending.append((entry, text))
            self._parse(text)
        if final:
            self._parse(self._detokenizer.flush(), final=True, is_cut=is_cut)

    def take(self) -> list[tuple[int, TokenLogprobs]]:
        """The tokens of the content since the last call, as in `ChatRun.content_logprobs`."""
        taken, self._content = self._content, []
        return taken

    def _parse(self, text: str, *, final: bool = False, is_cut: bool = False) -> None:
        kind = None
        for kind, value in self._parser.push(text, final=final, is_cut=is_cut):
            self._num_others += kind == "call" or (kind == "reasoning" != self._kind)
            self._kind = kind
            if kind == "content":
                self._take_content(len(value))
        if kind is not None:
            self._pending = []

    def _take_content(self, length: int) -> None:
        """Move the pending tokens of the last `length` characters to the content: what precedes
        them is a tag."""
        start = len(self._pending)
        while start and (length > 0 or not self._pending[start - 1][1]):
            start -= 1
            length -= len(self._pending[start][1])
        self._content += [(self._num_others, entry) for entry, _ in self._pending[start:]]
        self._pending = []

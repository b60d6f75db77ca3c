"""Translation of Ollama's requests into the one form of chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from anydecode.server.errors import ApiError
from anydecode.server.ollama.protocol import (
    GenerateRequest,
    GeneratingBody,
    ModelOptions,
    OllamaChatRequest,
    OllamaMessage,
)
from anydecode.server.options import adapter_of
from anydecode.server.prompts import effort_variables
from anydecode.server.protocol import ChatRequest, Function, Message, Tool
from anydecode.server.service import Service
from anydecode.server.translation import chat_request, thinking_variables

#: The tag of models without another one.
LATEST = ":latest"
#: Ollama's defaults. Its repetition penalty is left out: it is not one of the last 64 tokens here.
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
#: The fields of an earlier call that have an effect.
_READ_OF_CALL: Any = {"id": True, "function": {"name", "arguments"}}
#: Options of the engine that have no effect here: these APIs have fields for them, or one answer.
_NO_OPTIONS = ("logprobs", "model", "n", "stream", "stream_options")


def served_model(name: str | None, service: Service) -> str:
    """The name of the model or adapter that a client calls `name`: itself, or with a tag.

    Raises:
        ApiError: There is none.
    """
    served = service.settings.name
    name = known_name(name, [served, *service.llm.adapters])
    return adapter_of(name, service.llm, service.settings) or served


def known_name(name: str | None, available: list[str]) -> str | None:
    """The name of a model that a client calls `name`: itself, or without its tag."""
    if name is not None and name.endswith(LATEST) and name not in available:
        return name[: -len(LATEST)]
    return name


def chat_form(body: OllamaChatRequest, service: Service) -> tuple[ChatRequest, list[str]]:
    """The chat request of `body`, and the names of the fields without effect."""
    messages = [_message(message) for message in body.messages or ()]
    is_continued = bool(messages) and messages[-1].role == "assistant"
    return _form(
        body,
        service,
        messages=messages,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        continue_final_message=is_continued,
    )


def generate_form(body: GenerateRequest, service: Service) -> tuple[ChatRequest, list[str]]:
    """The chat request of `body`, and the names of the fields without effect. If the prompt is not
    rendered, it is the message."""
    refused = {
        "template": (body.template, "render the prompt yourself, and set raw"),
        "context": (body.context, "send the whole conversation to /api/chat"),
        "images": (body.images, "this model accepts text only"),
        "system": (
            not body.is_rendered and body.system,
            "with raw or suffix, write it into prompt",
        ),
    }
    for name, (value, advice) in refused.items():
        if value:
            raise ApiError(400, f"{name} is not supported here: {advice}")
    messages = [Message(role="system", content=body.system)] if body.system else []
    messages.append(Message(role="user", content=body.prompt or ""))
    return _form(body, service, messages=messages)


def _form(body: GeneratingBody, service: Service, **fields: Any) -> tuple[ChatRequest, list[str]]:
    options: Any = body.options or ModelOptions.model_construct()
    template = service.tokenizer.chat_template
    ignored = list(ignored_names(body, service))
    names = ("temperature",) if options.mirostat else _DEFAULTS
    fields |= {
        name: service.llm.sampling_defaults.get(name, _DEFAULTS[name])
        for name in names
        if getattr(options, name) is None
    }
    if options.num_predict is not None:
        fields["max_tokens"] = options.num_predict if options.num_predict > 0 else None
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.seed == -1:  # a random one
        fields["seed"] = None
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["response_format"] = {"type": "json_schema", "schema": body.format}
    variables: dict[str, Any] = {}
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
        variables = effort_variables(body.think, template)
    elif body.think is not None:
        fields["chat_template_kwargs"] = variables = thinking_variables(body.think, template)
    if body.think is not None and not variables:
        ignored.append("think")
    fields |= {"model": served_model(body.model, service), "n": None}
    return chat_request(options, **fields), ignored


def _tool(tool: Tool) -> Tool:
    """`tool` without other fields."""
    function = tool.function
    return Tool(
        function=Function(
            name=function.name, description=function.description, parameters=function.parameters
        )
    )


def _message(message: OllamaMessage) -> Message:
    if message.images:
        raise ApiError(400, "messages: images are given; this model accepts text only")
    extra: dict[str, Any] = {
        "reasoning_content": message.thinking,
        "tool_call_id": message.tool_call_id,
        "name": message.tool_name,
    }
    if message.tool_calls:
        extra["tool_calls"] = [
            {"type": "function", **call.model_dump(exclude_none=True, include=_READ_OF_CALL)}
            for call in message.tool_calls
        ]
    set_extra = {name: value for name, value in extra.items() if value is not None}
    return Message(role=message.role, content=message.content or "", **set_extra)


def is_zero(keep_alive: float | str | None) -> bool:
    """Whether a model is to be unloaded after the request."""
    return keep_alive in (0, "0", "0s", "0m", "0h")


def ignored_names(body: BaseModel, service: Service) -> Iterator[str]:
    """The names of the fields that are set but have no effect; "options.a" is a part of options."""
    yield from _unknown_names(body)
    keep_alive = getattr(body, "keep_alive", None)
    if keep_alive is not None and not (service.can_be_unloaded and is_zero(keep_alive)):
        yield "keep_alive"
    options = getattr(body, "options", None)
    if options is not None:
        yield from (f"options.{one}" for one in _NO_OPTIONS if getattr(options, one) is not None)


def _unknown_names(body: BaseModel, path: str = "") -> Iterator[str]:
    """The names of the unknown fields of a body and its parts that are not null."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield path + name
    for name in body.model_fields_set & type(body).model_fields.keys():
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                yield from _unknown_names(part, f"{path}{name}.")

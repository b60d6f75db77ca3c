"""Conversion of a request body into the options of `LLM.request`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.sampling.preset import SamplerPreset
from anydecode.server.errors import ApiError
from anydecode.server.prompts import effort_variables, text_of
from anydecode.server.protocol import (
    IGNORED_TYPES,
    OTHER_NAMES,
    Body,
    ChatRequest,
    Options,
    SamplingFields,
    Tool,
)
from anydecode.server.settings import Settings

_FIELDS_OF_CALL = frozenset({"id", "index", "type", "function"})
#: How a chat template reads a field of a message or a tool.
_READS = (".{}", "'{}'", '"{}"')
#: The temperature of OpenAI's API.
_DEFAULT_TEMPERATURE = 1.0


def sampling_of(llm: LLM) -> dict[str, float]:
    """The sampling options of requests that set none."""
    return {"temperature": _DEFAULT_TEMPERATURE, **llm.sampling_defaults}


def effective_temperature(body: SamplingFields, llm: LLM) -> float:
    """The temperature of a request: its own, that of the model's files, or OpenAI's default."""
    given: float | None = body.temperature  # type: ignore[attr-defined,unused-ignore]
    return sampling_of(llm)["temperature"] if given is None else given


def engine_options(
    body: Options, llm: LLM, settings: Settings, namespace: str | None
) -> dict[str, Any]:
    """The options for `LLM.request`. Raises `ApiError` or `InvalidRequestError`."""
    options: dict[str, Any] = {}
    if "temperature" not in llm.sampling_defaults:
        options["temperature"] = _DEFAULT_TEMPERATURE
    for name in SamplingFields.model_fields:
        if (value := getattr(body, name)) is not None:
            options[name] = value
    check_extra_fields(body)
    if effective_temperature(body, llm) == 0 and options.get("n", 1) == 1:
        options.pop("n", None)
    options["decoder"] = (
        check_decoder(body.decoder, settings)
        if body.decoder
        else settings.decoder or llm.default_decoder
    )
    options["sampler"] = [
        check_processor(choice, settings) for choice in body.logits_processors or ()
    ]
    options["adapter"] = adapter_of(body.model, llm, settings)
    options["trace"] = bool(body.trace)
    options["priority"] = body.priority or 0
    options["namespace"] = namespace
    options["negative_prompt"] = body.negative_prompt
    options["first_finish"] = body.first_finish
    options["segment"] = body.segment
    options["resume"] = None if body.resume is None else body.resume.model_dump()
    if isinstance(body, ChatRequest) and body.prediction is not None:
        options["prediction"] = text_of(body.prediction.content, "prediction")
    if body.first_finish is not None and body.stream:
        message = "first_finish cannot be streamed: the chosen samples are known only at the end"
        raise ApiError(400, message, param="first_finish")
    return options


def check_extra_fields(body: Options) -> None:
    """Raise `ApiError` for unknown fields, for unsupported fields of OpenAI's API that would change
    the answer, and for fields without effect of a wrong type."""
    extra = body.model_extra or {}
    unknown = sorted(extra.keys() - body.IGNORED.keys() - body.REFUSED.keys())
    for name in sorted(body.model_fields_set):
        part = getattr(body, name)
        if isinstance(part, Body):
            unknown += [f"{name}.{field}" for field in sorted(part.model_extra or ())]
    for name, others in OTHER_NAMES.items():
        if both := [other for other in others if other in unknown]:
            message = f"{both[0]} and {name} are the same field; send one of them"
            raise ApiError(400, message, code="invalid_value", param=both[0])
    if unknown:
        names = ", ".join(unknown)
        raise ApiError(400, f"unknown field {names}", code="unknown_parameter", param=unknown[0])
    for name, (kind, described) in IGNORED_TYPES.items():
        if not isinstance(extra.get(name), kind | None):
            raise ApiError(400, f"{name} must be {described}", code="invalid_body", param=name)
    for name, (neutral, advice) in body.REFUSED.items():
        if _has_effect(extra.get(name), neutral):
            message = f"{name} is not supported here: {advice}"
            raise ApiError(400, message, code="unsupported_parameter", param=name)


def ignored_fields(body: Options, template: str | None) -> list[str]:
    """Names of the fields that are set but have no effect; "a.b" is a part of a field. `template`
    is the chat template, which may support a reasoning effort."""
    set_fields = body.model_fields_set
    names = [
        name
        for name, neutral in body.IGNORED.items()
        if name.partition(".")[0] in set_fields and _has_effect(_field_value(body, name), neutral)
    ]
    for name in ("reasoning_effort", "reasoning.effort"):
        effort = _field_value(body, name)
        if effort is not None and not effort_variables(effort, template):
            names.append(name)
    if isinstance(body, ChatRequest):
        names += {f"messages.{name}" for name in _unread_fields(body, template)}
        predicted = None if body.prediction is None else body.prediction.content
        names += {f"prediction.content.{name}" for name in _unread_of_parts(predicted)}
    names += set(_unread_of_choice(body))
    return sorted(names)


def _unread_fields(body: ChatRequest, template: str | None) -> Iterator[str]:
    """Fields of messages and of their calls that the chat template does not mention, and those of
    their parts besides texts. The id of a call belongs to its result also where no template shows
    it."""
    for message in body.messages:
        for call in message.tool_calls or ():
            function = call.get("function")
            inner = function if isinstance(function, dict) else {}
            for path, part, read in (
                ("tool_calls", call, _FIELDS_OF_CALL),
                ("tool_calls.function", inner, {"name", "arguments"}),
            ):
                for name in part.keys() - read:
                    if part[name] and not _is_read(name, template):
                        yield f"{path}.{name}"
        yield from (f"content.{name}" for name in _unread_of_parts(message.content))
        for name, value in (message.model_extra or {}).items():
            if value and name != "tool_call_id" and not _is_read(name, template):
                yield name


def _unread_of_parts(content: str | list[dict[str, Any]] | None) -> Iterator[str]:
    """Fields of the parts of a content besides their texts and images."""
    for part in content if isinstance(content, list) else ():
        read = "image_url" if part.get("type") == "image_url" else "text"
        yield from (name for name in part.keys() - {"type", read} if part[name])


def _unread_of_choice(body: Options) -> Iterator[str]:
    """Fields of the tools that a `tool_choice` allows, besides their names, as
    "tool_choice.tools.parameters": those of the tools themselves apply."""
    choice = getattr(body, "tool_choice", None)
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    nested = choice.get("allowed_tools")
    path = "tool_choice.allowed_tools.tools" if nested else "tool_choice.tools"
    for tool in (nested or choice)["tools"]:
        function = tool.get("function")
        inner = function if isinstance(function, dict) else {}
        for place, part, read in (
            (path, tool, {"type", "name", "function"}),
            (f"{path}.function", inner, {"name"}),
        ):
            yield from (f"{place}.{name}" for name in part.keys() - read if part[name])


def check_tools(tools: list[Tool], template: str | None) -> None:
    """Raise `ApiError` for a field of a tool that is neither OpenAI's nor one that the chat
    template reads by its name."""
    for number, tool in enumerate(tools):
        function = {
            name: value
            for name, value in (tool.function.model_extra or {}).items()
            if name != "strict" and not _is_read(name, template)
        }
        for path, fields in (("", tool.model_extra or {}), ("function.", function)):
            for name, value in fields.items():
                if value is not None:
                    field = f"tools.{number}.{path}{name}"
                    message = f"unknown field {field}"
                    raise ApiError(400, message, code="unknown_parameter", param=field)


def _is_read(name: str, template: str | None) -> bool:
    """Whether a chat template mentions a field."""
    return any(form.format(name) in (template or "") for form in _READS)


def _field_value(body: Options, path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _has_effect(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and value not in neutral


def check_decoder(choice: str, settings: Settings) -> str:
    """`choice`. Nothing is built.

    Raises:
        ApiError: If requests may not select the method, or set one of its parameters so.
    """
    if choice not in settings.allowed_decoders:
        try:
            key = choice.partition(":")[0]
            catalogue.check_kind(key, "a decoder", Decoder, SamplerPreset, Constraint)
            catalogue.check_remote(choice)
        except InvalidRequestError as error:
            raise ApiError(400, str(error), code="invalid_value", param="decoder") from None
    return choice


def check_processor(choice: str, settings: Settings) -> str:
    """`choice`, a sampler preset with logits processors. Nothing is built.

    Raises:
        ApiError: If requests may not name it, or set one of its parameters so.
    """
    allowed = settings.allowed_logits_processors
    key = choice.partition(":")[0]
    try:
        if choice not in allowed:
            if key not in allowed:
                known = f"allowed are {', '.join(allowed)}" if allowed else "it allows none"
                raise InvalidRequestError(
                    f"requests to this server may not name the logits processor {choice!r}; {known}"
                    " (--allow-logits-processor)"
                )
            catalogue.check_remote(choice)
        catalogue.check_kind(key, "a sampler", SamplerPreset)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), code="invalid_value", param="logits_processors") from None
    return choice


def adapter_of(model: str | None, llm: LLM, settings: Settings) -> str | None:
    """The adapter that `model` names; None for the model itself."""
    if not model or model == settings.name:
        return None
    if model in llm.adapters:
        return model
    raise unknown_model(model, [settings.name, *llm.adapters])


def unknown_model(name: str, available: list[str]) -> ApiError:
    """The error of a request for a model that does not exist."""
    names = ", ".join(available)
    message = f"the model {name!r} does not exist on this server; available: {names}"
    return ApiError(404, message, code="model_not_found", param="model")


def check_prompt(tokens: list[int], settings: Settings) -> None:
    """Raise `ApiError` if a prompt is longer than `settings.max_prompt`."""
    if settings.max_prompt and len(tokens) > settings.max_prompt:
        raise ApiError(
            400,
            f"the prompt has {len(tokens)} tokens; this server allows {settings.max_prompt}",
            code="context_length_exceeded",
            param="messages",
        )


def check_choices(count: int, settings: Settings) -> None:
    """Raise `ApiError` if one request has more choices than the server allows."""
    if count > settings.max_choices:
        message = (
            f"prompts times n (or best_of) is {count}; this server allows {settings.max_choices}"
        )
        raise ApiError(400, message, code="invalid_value", param="n")

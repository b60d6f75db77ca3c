"""From a request body to what the engine is asked for."""

from __future__ import annotations

from typing import Any

from anydecode import catalogue
from anydecode.engine.llm import LLM
from anydecode.engine.methods import parameters
from anydecode.errors import InvalidRequestError
from anydecode.sampling.params import SamplingParams
from anydecode.server.errors import ApiError
from anydecode.server.prompts import effort_variables
from anydecode.server.protocol import Options
from anydecode.server.settings import Settings

#: Largest number that a client may give a decoder as a parameter.
LARGEST = 4096
#: What a body may set by its own name; `echo` with `logprobs` asks for `prompt_logprobs`.
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__) - {"prompt_logprobs"}
_SHARED = ("temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty")


def engine_options(
    body: Options, llm: LLM, settings: Settings, namespace: str | None
) -> dict[str, Any]:
    """Options for `LLM.request`. Raises `ApiError` or `InvalidRequestError`."""
    options: dict[str, Any] = {"temperature": 1.0}
    for name in _SHARED:
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if body.stop is not None:
        options["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias:
        options["logit_bias"] = token_biases(body.logit_bias)
    options.update(further(body))
    if options.get("temperature") == 0 and options.get("n", 1) == 1:
        options.pop("n", None)
    options["decoder"] = (
        checked_decoder(body.decoder) if body.decoder else settings.decoder or llm.default_decoder
    )
    options["adapter"] = adapter_of(body.model, llm, settings)
    options["trace"] = bool(body.trace)
    options["priority"] = body.priority or 0
    options["namespace"] = namespace
    options["first_finish"] = body.first_finish
    options["segment"] = body.segment
    options["resume"] = body.resume
    if body.first_finish is not None and body.stream:
        message = "who finishes first is known at the end only; first_finish answers whole"
        raise ApiError(400, message, param="first_finish")
    return options


def further(body: Options) -> dict[str, Any]:
    """Fields beyond OpenAI's: those of `SamplingParams`. Others are refused by name, and so are
    OpenAI's own without which the answer would mean something else."""
    extra = body.model_extra or {}
    unknown = sorted(set(extra) - _SAMPLING - body.IGNORED.keys() - body.REFUSED.keys())
    if unknown:
        names = ", ".join(unknown)
        raise ApiError(400, f"unknown field {names}", code="unknown_parameter", param=unknown[0])
    for name, (harmless, advice) in body.REFUSED.items():
        if _asks(extra.get(name), harmless):
            message = f"{name} is not supported here: {advice}"
            raise ApiError(400, message, code="unsupported_parameter", param=name)
    return {name: extra[name] for name in extra if name in _SAMPLING and extra[name] is not None}


def ignored(body: Options, template: str | None) -> list[str]:
    """Fields that ask for something and have no effect here; "a.b" is a part of a field. `template`
    is the chat template, which may know of a reasoning effort."""
    set_fields = body.model_fields_set
    names = [
        name
        for name, harmless in body.IGNORED.items()
        if name.partition(".")[0] in set_fields and _asks(_given(body, name), harmless)
    ]
    for name in ("reasoning_effort", "reasoning.effort"):
        effort = _given(body, name)
        if effort is not None and not effort_variables(effort, template):
            names.append(name)
    return sorted(names)


def _given(body: Options, path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _asks(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is not None and value not in harmless


def token_biases(biases: dict[str, float]) -> dict[int, float]:
    """OpenAI's string keys as token ids."""
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias") from None


def checked_decoder(choice: str) -> str:
    """`choice`, unless it reaches for files or its parameters are out of all proportion."""
    key, _, rest = choice.partition(":")
    only = "that is for the server's own options, not for requests"
    if getattr(catalogue.kind_of(key), "reads_files", False):
        raise ApiError(400, f"{key!r} reads files of this machine; {only}", param="decoder")
    given = parameters(rest, catalogue.text_parameters(key))
    if files := catalogue.file_parameters(key) & given.keys():
        message = f"{key!r}: {min(files)} names a file; {only}"
        raise ApiError(400, message, param="decoder")
    for value in given.values():
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ApiError(400, f"a decoder's parameters go up to {LARGEST}", param="decoder")
    return choice


def adapter_of(model: str | None, llm: LLM, settings: Settings) -> str | None:
    """The adapter that `model` names; None for the model itself."""
    if model in (None, "", settings.name):
        return None
    if model in llm.adapters:
        return model
    known = ", ".join([settings.name, *llm.adapters])
    message = f"the model {model!r} does not exist here; there are {known}"
    raise ApiError(404, message, code="model_not_found", param="model")


def check_prompt(tokens: list[int], settings: Settings) -> None:
    """Raise `ApiError` for a prompt above the operator's limit."""
    if settings.max_prompt and len(tokens) > settings.max_prompt:
        raise ApiError(
            400,
            f"the prompt has {len(tokens)} tokens; this server takes {settings.max_prompt}",
            code="context_length_exceeded",
            param="messages",
        )


def check_choices(count: int, settings: Settings) -> None:
    """Raise `InvalidRequestError` where one request asks for too many answers at once."""
    if count > settings.max_choices:
        raise InvalidRequestError(
            f"prompts times n (or best_of) is {count}; this server allows {settings.max_choices}"
        )

"""What the APIs that are not OpenAI's share: their requests become a `ChatRequest`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from anydecode.api.generation import Generation
from anydecode.server.protocol import ChatRequest, Options
from anydecode.server.service import Service, extension

#: Fields of `Options` that a `ChatRequest` defines anew, or that the APIs spell differently.
_OWN = frozenset({"logprobs", "stream", "stream_options"})


def chat_request(options: Options, **fields: Any) -> ChatRequest:
    """A chat request with the fields of `options` that are set, and `fields`, which have been
    validated and take precedence."""
    names = (options.model_fields_set & Options.model_fields.keys()) - _OWN
    return ChatRequest.model_construct(**{name: getattr(options, name) for name in names} | fields)


def thinking_variables(is_enabled: bool | None, template: str | None) -> dict[str, bool]:
    """The template variables that turn reasoning on or off; empty if the template has none."""
    if is_enabled is None or template is None:
        return {}
    return {name: is_enabled for name in ("enable_thinking", "thinking") if name in template}


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. Of a call that was cut, it has what is complete."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:  # nothing was generated
        return {}
    return _finite(value) if isinstance(value, dict) else {}


def _finite(value: Any) -> Any:
    """`value` with the largest number in place of those that a float cannot represent."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    return value


def extension_of(
    generations: list[Generation], service: Service, request: ChatRequest, ignored: Iterable[str]
) -> dict[str, Any]:
    """The `anydecode` object of an answer. `ignored`: the fields without effect, by the names of
    the API."""
    fields = extension(generations, service.tokenizer, request)
    fields.pop("ignored", None)  # by the names of OpenAI's API
    if names := sorted(set(ignored)):
        fields["ignored"] = names
    return fields

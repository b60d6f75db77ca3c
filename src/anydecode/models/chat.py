"""Chat templates: a conversation as the checkpoint's Jinja template writes it.

A template is a stranger's program. It runs in Jinja's immutable sandbox, which keeps it from the
interpreter, and within bounds of time, output and string size, which keep it from stalling it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anydecode.errors import InvalidRequestError

#: Bounds of one rendering.
MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
MAX_TEMPLATE = 1 << 20


class _TemplateRefusal(TemplateError):
    """What a template raises through `raise_exception`, or what the bounds raise."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training; for
    rendering its body counts alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a deadline that look-ups, calls and arithmetic check, and a bound on the
    strings and lists that `*` and `+` make."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self.deadline = float("inf")
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def check(self) -> None:
        if time.monotonic() > self.deadline:
            raise _TemplateRefusal(f"it ran for more than {MAX_SECONDS:g} seconds")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        if operator == "**" and max(_size(left), _size(right)) > 1024:
            raise _TemplateRefusal("it computes too large a power")
        if operator == "*":
            sized = [x for x in (left, right) if isinstance(x, (str, bytes, list, tuple))]
            counts = [x for x in (left, right) if isinstance(x, int)]
            if sized and counts and len(sized[0]) * counts[0] > MAX_CHARACTERS:
                raise _TemplateRefusal("it makes too long a text")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise _TemplateRefusal(message)


def select_template(templates: str | Mapping[str, str] | None, variables: Mapping[str, Any]) -> str:
    """The template to use: one that is named "tool_use" when tools are given, else "default"."""
    if isinstance(templates, str):
        return templates
    if not templates:
        raise InvalidRequestError("this model has no chat template; give it a plain prompt")
    if variables.get("tools") and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    raise InvalidRequestError(f"this model's chat templates are {', '.join(sorted(templates))}")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The conversation as `template` writes it.

    Raises `InvalidRequestError` in one line when the template is faulty, refuses the conversation
    or exceeds the bounds.
    """
    if len(template) > MAX_TEMPLATE:
        raise InvalidRequestError(f"the chat template has {len(template)} characters: too many")
    names = {"tools": None, "documents": None, **variables}
    try:
        environment, compiled = _compile(template)
        environment.deadline = time.monotonic() + MAX_SECONDS
        return _collect(
            compiled(messages=list(messages), add_generation_prompt=add_generation_prompt, **names),
            environment,
        )
    except Exception as error:
        # A template can fail in any way that Python can: its expressions are Python's.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequestError(f"the chat template cannot write this: {reason}") from None


@lru_cache(maxsize=16)
def _compile(template: str) -> tuple[_Environment, Callable[..., Any]]:
    environment = _Environment()
    return environment, environment.from_string(template).generate


def _collect(pieces: Any, environment: _Environment) -> str:
    out: list[str] = []
    length = 0
    for piece in pieces:
        environment.check()
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise _TemplateRefusal("it makes too long a text")
        out.append(piece)
    return "".join(out)

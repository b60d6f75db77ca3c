"""Chat templates: renders a conversation with the checkpoint's Jinja template.

A template is untrusted code. It runs in Jinja's immutable sandbox, with limits on time, output and
string size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from math import inf
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anydecode.errors import InvalidRequestError

#: Limits of one rendering; seconds are those of the processor.
MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
MAX_TEMPLATE_CHARACTERS = 1 << 20


#: The time limit of renderings in a block of `time_limit`; None for `MAX_SECONDS`.
_time_limit: ContextVar[float | None] = ContextVar("time_limit", default=None)
#: The processor time of this thread at which its rendering ends. Threads share the environments.
_deadline: ContextVar[float] = ContextVar("deadline", default=inf)


class SlowTemplateError(InvalidRequestError):
    """A rendering passed its time limit."""


class _TimeoutError(Exception):
    """Raised in a template that has passed its time limit."""


class _TemplateError(TemplateError):
    """Raised by a template through `raise_exception`, or by an exceeded limit."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks assistant text for training; only its
    body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a deadline checked at every look-up, call and arithmetic operation, and
    limits on the results of `*` and `**`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,  # compiling, which has no limits, must compute no constants
            finalize=_as_is,
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def check(self) -> None:
        if time.thread_time() > _deadline.get():
            raise _TimeoutError(f"it ran for more than {_seconds():g} seconds")

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
            raise _TemplateError("it computes too large a power")
        if operator == "*":
            sized = [x for x in (left, right) if isinstance(x, (str, bytes, list, tuple))]
            counts = [x for x in (left, right) if isinstance(x, int)]
            if sized and counts and len(sized[0]) * counts[0] > MAX_CHARACTERS:
                raise _TemplateError("its output is too long")
        return super().call_binop(context, operator, left, right)


@pass_context
def _as_is(context: Context, value: Any) -> Any:
    """`value`. As it depends on the context, outputs are not computed while a template is
    compiled."""
    return value


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
    raise _TemplateError(message)


def select_template(templates: str | Mapping[str, str] | None, variables: Mapping[str, Any]) -> str:
    """The template to use: the one named "tool_use" if tools are given, else "default".

    Raises:
        InvalidRequestError: The model has no template of either name.
    """
    if isinstance(templates, str):
        return templates
    if not templates:
        raise InvalidRequestError("this model has no chat template; pass a plain prompt instead")
    if variables.get("tools") and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    raise InvalidRequestError(
        "this model has no chat template named 'default'; its templates are "
        + ", ".join(sorted(templates))
    )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render a conversation.

    Args:
        template: The Jinja source.
        messages: Objects with `role` and `content`.
        add_generation_prompt: End with the start of an assistant message.
        **variables: Further variables of the template, such as `tools`.

    Raises:
        InvalidRequestError: The template is faulty, rejects the conversation or exceeds a limit.
            The message is one line.
        MemoryError: The rendering takes more memory than there is.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidRequestError(
            f"the chat template has {len(template)} characters; the maximum is"
            f" {MAX_TEMPLATE_CHARACTERS}"
        )
    names = {"tools": None, "documents": None, **variables}
    try:
        environment, compiled = _compile(template)
        _deadline.set(time.thread_time() + _seconds())
        return _collect(
            compiled(messages=list(messages), add_generation_prompt=add_generation_prompt, **names),
            environment,
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template's expressions can raise any Python exception.
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = SlowTemplateError if isinstance(error, _TimeoutError) else InvalidRequestError
        raise kind(f"the chat template cannot render this conversation: {reason}") from None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Renderings in this block raise `SlowTemplateError` after `seconds`."""
    token = _time_limit.set(seconds)
    try:
        yield
    finally:
        _time_limit.reset(token)


def _seconds() -> float:
    """The time limit of a rendering."""
    seconds = _time_limit.get()
    return MAX_SECONDS if seconds is None else seconds


@lru_cache(maxsize=16)
def _compile(template: str) -> tuple[_Environment, Callable[..., Any]]:
    environment = _Environment()
    return environment, environment.from_string(template).generate


def _collect(chunks: Any, environment: _Environment) -> str:
    parts: list[str] = []
    length = 0
    for chunk in chunks:
        environment.check()
        length += len(chunk)
        if length > MAX_CHARACTERS:
            raise _TemplateError("its output is too long")
        parts.append(chunk)
    return "".join(parts)

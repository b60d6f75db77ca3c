"""Chat templates: renders a conversation with the checkpoint's Jinja template.

A template is untrusted code. It runs in Jinja's immutable sandbox, with limits on time, output and
string size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.models.template_sandbox import (
    MAX_CHARACTERS,
    MAX_SECONDS,
    LimitInTemplateError,
    Sandbox,
    TimeoutInTemplateError,
    check_time,
    rendering,
)

MAX_TEMPLATE_CHARACTERS = 1 << 20


#: The time limit of renderings in a block of `time_limit`; None for `MAX_SECONDS`.
_time_limit: ContextVar[float | None] = ContextVar("time_limit", default=None)


class SlowTemplateError(InvalidRequestError):
    """A rendering passed its time limit."""


class CallArguments(dict[str, Any]):
    """The arguments of a tool call: an object for the templates that read its items, and its JSON
    text for those that write it or join it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def select_template(templates: str | Mapping[str, str] | None, variables: Mapping[str, Any]) -> str:
    """The template to use: the one named "tool_use" if tools are given, else "default".

    Raises:
        InvalidRequestError: The model has no template of either name.
    """
    if isinstance(templates, str):
        return templates
    if not templates:
        raise InvalidRequestError(
            "this model has no chat template: continue a text instead (generate)"
        )
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
        generate = _compile(template)
        with rendering(_seconds()):
            return _collect(
                generate(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, **names
                )
            )
    except MemoryError:
        raise
    except Exception as error:
        # A template's expressions can raise any Python exception.
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = (
            SlowTemplateError if isinstance(error, TimeoutInTemplateError) else InvalidRequestError
        )
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
def _compile(template: str) -> Callable[..., Any]:
    return Sandbox().from_string(template).generate


def _collect(chunks: Any) -> str:
    parts: list[str] = []
    length = 0
    for chunk in chunks:
        check_time()
        length += len(chunk)
        if length > MAX_CHARACTERS:
            raise LimitInTemplateError("its output is too long")
        parts.append(chunk)
    return "".join(parts)

"""Draft models of `anydecode bench speculative`: one `LLM` for each, all with the same loaded
target, so that methods with different draft models take turns in one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError

#: The name of the draft model of methods that name none.
DEFAULT = ""
_NAME = re.compile(r"[\w.-]+")


def parse_drafts(values: Sequence[str]) -> dict[str, str | None]:
    """The draft models of `--draft` by name, the default one first: a value is `NAME=PATH`, or
    `PATH` for the default. None means that none is given, so that a shipped drafter is used.

    Raises:
        InvalidRequestError: A value is incomplete, or two have the same name.
    """
    drafts: dict[str, str | None] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not _NAME.fullmatch(name):
            name, path = DEFAULT, value
        if not path or name in drafts:
            raise InvalidRequestError(
                f"--draft is {value!r}; give at most one PATH, and others as NAME=PATH with"
                " different names"
            )
        drafts[name] = path
    return {DEFAULT: drafts.pop(DEFAULT, None), **drafts}


def open_llms(
    open_llm: Callable[..., LLM],
    model: str,
    drafts: Mapping[str, str | None],
    threads: int | None,
    stack: ExitStack,
) -> dict[str, LLM]:
    """One `LLM` per draft model, by its name; `stack` closes them. The target is loaded once."""
    default = stack.enter_context(open_llm(model, draft=drafts[DEFAULT], threads=threads))
    llms = {DEFAULT: default}
    for name, draft in drafts.items():
        if name != DEFAULT:
            llms[name] = stack.enter_context(
                open_llm(default.model, tokenizer=default.tokenizer, draft=draft, threads=threads)
            )
    return llms


def split_method(names: Collection[str], method: str) -> tuple[str, str]:
    """The name of a method's draft model, and the method without it: `METHOD@NAME` has the draft
    model NAME, other methods have the default one.

    Raises:
        InvalidRequestError: No draft model has this name.
    """
    key, at, name = method.rpartition("@")
    if at and name in names:
        return name, key
    if at and ":" not in key and _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"--methods has {method}, and no draft model is called {name}: give it with"
            f" --draft {name}=PATH"
        )
    return DEFAULT, method


def find_llm(llms: Mapping[str, LLM], method: str) -> tuple[LLM, str]:
    """The `LLM` that runs a method, and the method without the name of its draft model; see
    `split_method`."""
    name, key = split_method(llms, method)
    return llms[name], key

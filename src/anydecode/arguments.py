"""Checks the arguments of public functions by their annotations: a value of another kind is named
in one line, where Python would fail somewhere inside."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, is_typeddict

import numpy as np

from anydecode.errors import AnydecodeError, InvalidRequestError, quoted

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

#: How kinds of values are described, for one and for several.
_WORDS: dict[Any, tuple[str, str]] = {
    str: ("a text", "texts"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    Path: ("a path", "paths"),
    NoneType: ("None", "None"),
    Mapping: ("a dict", "dicts"),
    Hashable: ("hashable, such as a text or a number", "hashable values"),
    Callable: ("a function", "functions"),
}


def checked_arguments(
    error: type[AnydecodeError] = InvalidRequestError,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorates a function, which then raises `error` for arguments that are not of the kinds of
    its annotations; further arguments (`*args`, `**options`) are left out.

    `int` and `float` allow numbers of numpy, but not `bool`; sequences allow arrays, but not texts.
    Annotations of other forms, and names that are imported for type checkers only, allow all.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        checkable = {name for name, one in signature.parameters.items() if one.kind not in several}

        @wraps(function)
        def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Python says which argument is missing
            values = {name: one for name, one in given.items() if name in checkable}
            check_kinds(values, function, error)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_kinds(
    values: Mapping[str, Any],
    annotated: Any,
    error: type[AnydecodeError] = InvalidRequestError,
) -> None:
    """Raise `error` unless every value is of the kind of its name in the annotations of
    `annotated`, which is a function, a dataclass or a `TypedDict`."""
    kinds = _kinds(annotated)
    for name, value in values.items():
        if name in kinds:
            for place, part, kind in _faults(name, value, kinds[name]):
                raise error(f"{place} is {quoted(part)}; it must be {_described(kind)}")


class _Unknown:
    """Stands for annotations that are imported for type checkers only."""

    def __class_getitem__(cls, item: object) -> type[_Unknown]:
        return cls


class _Scope(dict[str, Any]):
    """The names of a module. Those that it does not have are unknown."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Unknown)


@cache
def _kinds(annotated: Any) -> dict[str, Any]:
    owners = reversed(annotated.__mro__[:-1]) if isinstance(annotated, type) else [annotated]
    found: dict[str, Any] = {}
    for owner in owners:
        scope = _Scope(vars(sys.modules[owner.__module__]))
        for name, annotation in inspect.get_annotations(owner).items():
            text = getattr(annotation, "__forward_arg__", annotation)  # of a `TypedDict`
            found[name] = eval(text, {}, scope) if isinstance(text, str) else annotation
    return found


def _faults(name: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of `value` that are not of their kind: where, the part, and the kind."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        faults = [next(_faults(name, value, part), None) for part in parts]
        if None not in faults:  # of a member, if the value is a list or a dict as it should be
            yield next((one for one in faults if one and one[0] != name), (name, value, kind))
    elif origin is tuple and ... not in parts:
        if not isinstance(value, tuple | list) or len(value) != len(parts):
            yield name, value, kind
        else:
            for index, (one, part) in enumerate(zip(value, parts, strict=True)):
                yield from _faults(f"{name}[{index}]", one, part)
    elif origin is not None and issubclass(origin, Sequence):
        if not is_list(value):
            yield name, value, kind
        else:
            for index, one in enumerate(value):
                yield from _faults(f"{name}[{index}]", one, parts[0])
    elif not _is_of(value, origin or kind):
        yield name, value, kind
    elif origin is Mapping:
        for key in value:
            yield from _faults(f"a key of {name}", key, parts[0])


def is_list(value: object) -> bool:
    """Whether a value is a list, or another sequence of values, such as an array: not a text."""
    is_sequence = isinstance(value, Sequence | np.ndarray)
    return is_sequence and not isinstance(value, str | bytes | bytearray)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is int or kind is float:
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is None:
        return value is None
    is_class = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    if not is_class or kind in (Any, _Unknown) or is_typeddict(kind):
        return True
    return isinstance(value, kind)


def _described(kind: Any, is_one: bool = True) -> str:
    """What values of a kind are, in words: of one, or of several."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        *words, last = [_described(part, is_one) for part in parts]
        return f"{', '.join(words)} or {last}"
    if origin is tuple and ... not in parts:
        members = ", ".join(_described(part) for part in parts)
        return f"{'a tuple' if is_one else 'tuples'} ({members})"
    if origin is not None and issubclass(origin, Sequence):
        return f"{'a list' if is_one else 'lists'} of {_described(parts[0], is_one=False)}"
    kind = NoneType if kind is None else origin or kind
    name = getattr(kind, "__name__", str(kind))
    one = f"an {name}" if name[0] in "AEIO" else f"a {name}"
    return _WORDS.get(kind, (one, f"{name} objects"))[not is_one]

"""Checks of arguments by annotations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import pytest

from anydecode.arguments import check_kinds, checked_arguments
from anydecode.errors import ConstraintError, InvalidRequestError

if TYPE_CHECKING:
    from anydecode import LLM


class Options(TypedDict, total=False):
    size: int
    names: Sequence[str | Path]


@checked_arguments()
def function(
    number: float = 1.0,
    size: int | None = None,
    flag: bool = False,
    pairs: Sequence[tuple[str, Sequence[int]]] = (),
    call: Callable[[str], bool] | None = None,
    names: Mapping[str, Any] | None = None,
    key: Hashable = None,
    llm: LLM | str | None = None,
    **options: int,
) -> str:
    """A function."""
    return "called"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"number": 5, "size": 5, "flag": True},
        {"number": np.float32(1), "size": np.int64(5), "flag": np.bool_(True)},
        {"number": float("nan"), "size": 10**30},
        {"pairs": [("a", [1]), ("b", np.array([1, 2]))]},
        {"pairs": [["a", ()]]},
        {"call": print, "names": {"a": object()}, "key": "a"},
        {"llm": 5},  # `LLM` is imported for type checkers only
        {"further": "x"},
    ],
)
def test_arguments_of_the_right_kinds_are_passed_on(arguments: dict[str, Any]) -> None:
    assert function(**arguments) == "called"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": "1"}, "number is '1'; it must be a number"),
        ({"number": True}, "number is True; it must be a number"),
        ({"size": 1.5}, "size is 1.5; it must be an integer or None"),
        ({"size": True}, "size is True; it must be an integer or None"),
        ({"flag": 1}, "flag is 1; it must be True or False"),
        (
            {"pairs": "ab"},
            "pairs is 'ab'; it must be a list of tuples (a text, a list of integers)",
        ),
        (
            {"pairs": [("a",)]},
            "pairs[0] is ('a',); it must be a tuple (a text, a list of integers)",
        ),
        ({"pairs": [("a", [1, 2.5])]}, "pairs[0][1][1] is 2.5; it must be an integer"),
        ({"call": 5}, "call is 5; it must be a function or None"),
        ({"names": [5]}, "names is [5]; it must be a dict or None"),
        ({"names": {5: 5}}, "a key of names is 5; it must be a text"),
        ({"key": [5]}, "key is [5]; it must be hashable, such as a text or a number"),
        ({"size": "x" * 9000}, f"size is '{'x' * 12}...{'x' * 13}'; it must be an integer or None"),
    ],
)
def test_arguments_of_other_kinds_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        function(**arguments)
    assert str(caught.value) == message


def test_python_says_which_arguments_are_missing_or_too_many() -> None:
    @checked_arguments()
    def needs_one(one: int) -> None: ...

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
        needs_one()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'two'"):
        needs_one(one=1, two=2)  # type: ignore[call-arg]


def test_options_and_fields_are_checked_too() -> None:
    @dataclass
    class Fields:
        size: int

    check_kinds({"size": 5, "names": ["a", Path("b")], "other": None}, Options)
    with pytest.raises(
        InvalidRequestError, match=r"^names\[0\] is 5; it must be a text or a path$"
    ):
        check_kinds({"names": [5]}, Options)
    with pytest.raises(ConstraintError, match="^size is None; it must be an integer$"):
        check_kinds(vars(Fields(None)), Fields, ConstraintError)  # type: ignore[arg-type]


def test_a_checked_function_keeps_its_name_and_text() -> None:
    assert (function.__name__, function.__doc__) == ("function", "A function.")

"""Rewards by name: those of this package, and those of others by entry points of the group
`anydecode.rewards`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from anydecode.catalogue import Text
from anydecode.errors import InvalidRequestError, one_line
from anydecode.rewards.programmatic import Confidence, Keywords, Length, Likelihood
from anydecode.rewards.reward import FunctionReward, Reward
from anydecode.rewards.unit_test import UnitTest

_GROUP = "anydecode.rewards"
#: Rewards by name.
REWARDS: dict[str, type[Reward]] = {
    "likelihood": Likelihood,
    "confidence": Confidence,
    "length": Length,
    "keywords": Keywords,
    "unit-test": UnitTest,
}

RewardChoice = str | Reward | Callable[[str, list[str]], Any]


def build(choice: RewardChoice) -> Reward:
    """The reward that `choice` names.

    Args:
        choice: A `Reward`; a function `(prompt, texts) -> values`; or "name" or
            "name:parameter=value+parameter=value".

    Raises:
        InvalidRequestError: There is no such reward, or a parameter is unknown or invalid.
    """
    if isinstance(choice, Reward):
        return choice
    if not isinstance(choice, str):
        if not callable(choice):
            raise InvalidRequestError(
                f"reward is {one_line(repr(choice), 80)}; pass a name, a Reward or a function"
            )
        return FunctionReward(choice)
    name, given = _parsed(choice)
    factory = _factory(name)
    signature = inspect.signature(factory)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise InvalidRequestError(f"reward {name!r}: {error}") from None
    built = factory(
        **{
            key: _typed(name, key, value, signature.parameters[key].annotation)
            for key, value in given.items()
        }
    )
    return built if isinstance(built, Reward) else FunctionReward(built)


def check_remote(choice: str) -> None:
    """Check that a request to a server may name this reward. Nothing is built.

    Raises:
        InvalidRequestError: It may not.
    """
    name, parameters = _parsed(choice)
    remote = getattr(_factory(name), "remote", None)
    if remote is None:
        raise InvalidRequestError(
            f"reward {name!r}: only the server's own options may use that, not requests"
        )
    for parameter, text in parameters.items():
        if parameter not in remote:
            known = ", ".join(remote) or "none of its parameters"
            raise InvalidRequestError(
                f"reward {name!r}: requests to a server may set {known}, not {parameter!r}"
            )
        value = text if isinstance(remote[parameter], Text) else _number(text)
        if not remote[parameter].allows(value):
            raise InvalidRequestError(
                f"reward {name!r}: {parameter} is {one_line(repr(value), 80)}; requests to a server"
                f" may set {remote[parameter]}"
            )


@dataclass(frozen=True)
class RewardName(Text):
    """The bounds of a parameter that names a reward: one that requests may name, of up to
    `max_length` characters."""

    max_length: int = 200

    def __str__(self) -> str:
        names = [name for name, kind in REWARDS.items() if kind.remote is not None]
        return f"a reward that requests may set ({', '.join(names)})"

    def allows(self, value: object) -> bool:
        """Whether a request may name this reward; raises `InvalidRequestError` if there is a better
        reason than its length."""
        if not super().allows(value):
            return False
        check_remote(str(value))
        return True


def _parsed(choice: str) -> tuple[str, dict[str, str]]:
    """Name and parameters."""
    name, _, rest = choice.partition(":")
    found: dict[str, str] = {}
    for part in filter(None, rest.split("+")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequestError(f"reward {name!r}: {part!r} is not of the form name=value")
        found[key.strip()] = value
    return name, found


def _typed(name: str, key: str, value: str, annotation: Any) -> int | float | str:
    """The value of a parameter: a number where its annotation says float or int, else the text."""
    if annotation not in ("float", "int", float, int):
        return value
    number = _number(value)
    if number is None or (annotation in ("int", int) and number != int(number)):
        raise InvalidRequestError(f"reward {name!r}: {key} takes a number, not {value!r}")
    return number if annotation in ("float", float) else int(number)


def _number(text: str) -> float | None:
    """The finite number that `text` is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _factory(name: str) -> Callable[..., Any]:
    """What makes the reward `name`: a class, or a function. An entry point may also name a function
    `(prompt, texts) -> values` through such a factory."""
    if name in REWARDS:
        return REWARDS[name]
    points = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in points:
        known = ", ".join([*REWARDS, *points])
        raise InvalidRequestError(f"no reward is called {one_line(name, 80)!r}; known: {known}")
    try:
        factory: Callable[..., Any] = points[name].load()
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise InvalidRequestError(f"reward {name!r} cannot be loaded: {reason}") from None
    return factory

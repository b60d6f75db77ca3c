"""An append-only log of results, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from anydecode.errors import InvalidRequestError

T = TypeVar("T")


class ResultsLog:
    """A file of JSON values, one per line, after a line with `settings`. `entries` are the values
    that it had when it was opened.

    Raises:
        InvalidRequestError: The file was written with other settings, or is not a results log.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.settings = settings
        self.entries: list[Any] = []
        text = file.read_text("utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a killed run may have left an incomplete last line
        lines = (whole or text).splitlines()
        if not lines:
            self.clear()
            return
        try:
            first, *entries = [json.loads(line) for line in lines]
        except ValueError:
            raise self._format_error() from None
        given = json.loads(json.dumps(settings))
        if first != given:
            raise InvalidRequestError(
                f"{file} has results of other settings: {_differences(first, given)}; give the"
                " same, or another file"
            )
        self.entries = entries
        if whole and whole != text:
            file.write_text(whole, "utf-8")

    def write(self, value: Any) -> None:
        """Appends one value and flushes it to the file."""
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(value) + "\n")

    def clear(self) -> None:
        """Removes all values; the settings stay."""
        self.file.write_text(json.dumps(self.settings) + "\n", "utf-8")
        self.entries = []

    def read(self, parse: Callable[[Any], T]) -> list[T]:
        """All values that the file had, each as the result of `parse`.

        Raises:
            InvalidRequestError: A value is no result: `parse` raised `TypeError` or `LookupError`.
        """
        try:
            return [parse(entry) for entry in self.entries]
        except (TypeError, LookupError):
            raise self._format_error() from None

    def _format_error(self) -> InvalidRequestError:
        return InvalidRequestError(f"{self.file} holds no results of this benchmark")


def _differences(stored: Any, given: dict[str, Any]) -> str:
    """The settings of a file that are not those given, such as "tokens is 8, not 9"."""
    if not isinstance(stored, dict):
        return json.dumps(stored)
    names = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
    pairs = [(name, json.dumps(stored.get(name)), json.dumps(given.get(name))) for name in names]
    return ", ".join(f"{name} is {old}, not {new}" for name, old, new in pairs)

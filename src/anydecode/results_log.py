"""An append-only log of results, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError


class ResultsLog:
    """A file of JSON values, one per line, after a line with `settings`. `held` are the values that
    it had when it was opened.

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
            raise self.format_error() from None
        if first != json.loads(json.dumps(settings)):
            raise InvalidRequestError(f"{file} has results of other settings: {lines[0]}")
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

    def format_error(self) -> InvalidRequestError:
        """The error to raise if a line cannot be read as a result."""
        return InvalidRequestError(f"{self.file} holds no results of this benchmark")

"""Results of a long run, kept as they come, so that a later run goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError


class ResultsLog:
    """JSON values, one a line, in `file`, behind a line of `settings`; `held` is what it has.
    Raises InvalidRequestError where the file belongs to other settings, or is no such file."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.settings = settings
        self.held: list[Any] = []
        text = file.read_text("utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left half a line
        lines = (whole or text).splitlines()
        if not lines:
            self.clear()
            return
        try:
            first, *held = [json.loads(line) for line in lines]
        except ValueError:
            raise self.foreign() from None
        if first != json.loads(json.dumps(settings)):
            raise InvalidRequestError(f"{file} holds answers of other settings: {lines[0]}")
        self.held = held
        if whole and whole != text:
            file.write_text(whole, "utf-8")

    def write(self, value: Any) -> None:
        """Keep one value, at once."""
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(value) + "\n")

    def clear(self) -> None:
        """Forget all values, and keep the settings."""
        self.file.write_text(json.dumps(self.settings) + "\n", "utf-8")
        self.held = []

    def foreign(self) -> InvalidRequestError:
        """What to raise where a line is not what the reader wrote."""
        return InvalidRequestError(f"{self.file} holds no answers of this benchmark")

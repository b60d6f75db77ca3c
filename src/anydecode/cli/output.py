"""Output to stdout: JSON, text as it is generated, and text that fits the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Any

from anydecode.serialization import to_plain


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    print(json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False))


def write_now(text: str) -> None:
    """Write streamed text to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def counted(count: int, one: str, more: str) -> str:
    """A number with its noun: "1 pass", "2 passes"."""
    return f"{count} {one if count == 1 else more}"


def output_width() -> int:
    """The width of the terminal, or 80 columns if stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80


def cut(text: str, width: int) -> str:
    """`text` cut to `width` columns, with an ellipsis if it is longer."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)].rstrip()}…"


def wrapped(text: str, width: int, begin: str = "", indent: str | None = None) -> str:
    """`text` after `begin`, broken into lines of `width` columns at spaces only, so that a path can
    be copied. Further lines begin with `indent` (default: as many spaces as `begin` has
    characters)."""
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin) if indent is None else indent,
        break_long_words=False,
        break_on_hyphens=False,
    )

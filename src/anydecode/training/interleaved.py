"""Texts for the decoder `simul-mt` with a trained policy (EAST: Fu et al., "LLMs Can Achieve
High-quality Simultaneous Machine Translation as Efficiently as Offline", arXiv:2504.09570): parts
of a source and of its translation in turn, each with its mark behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anydecode.errors import InvalidRequestError
from anydecode.training.block_adapter import Pair


@dataclass(frozen=True)
class Interleaved:
    """A translation in parts.

    Attributes:
        prompt: What stands before the source: the instruction.
        chunks: Parts of the source and what is written after each has been read.
    """

    prompt: str
    chunks: tuple[tuple[str, str], ...]


def read_interleaved(file: Path) -> list[Interleaved]:
    """Read JSON lines with the fields `prompt`, a text, and `chunks`, pairs of texts.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has another form.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}") from None
    return [_parsed(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(file: Path, number: int, line: str) -> Interleaved:
    try:
        entry = json.loads(line)
        prompt, chunks = entry["prompt"], entry["chunks"]
        pairs = tuple((source, target) for source, target in chunks)
    except (ValueError, KeyError, TypeError):
        prompt, pairs = None, ()
    texts = [prompt, *(text for pair in pairs for text in pair)]
    if not pairs or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(
            f"{file}:{number} is no object with prompt, a text, and chunks, pairs of texts"
        )
    return Interleaved(prompt, pairs)


def interleaved_row(
    one: Interleaved,
    encode: Callable[[str], list[int]],
    prompt: Sequence[int],
    marks: tuple[int, int],
) -> Pair:
    """The row of a translation: a part of the source, the mark at the end of reading, what is
    written, and the mark at the end of writing, in turn. Parts of the source behind the first begin
    with white space. All of it is learned.

    Args:
        one: The translation.
        encode: The tokens of a text.
        prompt: The tokens of its prompt.
        marks: The marks at the ends of reading and writing.
    """
    row: list[int] = []
    for source, target in one.chunks:
        separator = " " if row and not source[:1].isspace() else ""
        row += [*encode(separator + source), marks[0], *encode(target), marks[1]]
    return list(prompt), row

"""Prompts and what should follow them, from files of JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError


def read_solutions(path: Path) -> list[tuple[str, str]]:
    """The fields "prompt" and "canonical_solution" of every line, as of HumanEval.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has other fields.
    """
    fields = _fields(path, "prompt", "canonical_solution")
    return [(str(prompt), str(solution)) for prompt, solution in fields]


def read_numbers(path: Path) -> list[tuple[str, float]]:
    """The fields "prompt" and "number" of every line.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has other fields.
    """
    pairs = []
    for prompt, number in _fields(path, "prompt", "number"):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InvalidRequestError(f"{path}: {number!r} is not a number")
        if not math.isfinite(number):
            raise InvalidRequestError(f"{path}: {number} is not a finite number")
        pairs.append((str(prompt), float(number)))
    return pairs


def read_questions(path: Path) -> list[tuple[str, str]]:
    """The fields "prompt" and "answer", texts, of every line.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has other fields.
    """
    pairs = []
    for prompt, answer in _fields(path, "prompt", "answer"):
        if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt.strip():
            raise InvalidRequestError(
                f"{path}: {prompt!r} and {answer!r} are no question and answer"
            )
        pairs.append((prompt, answer))
    return pairs


def read_marked(path: Path) -> list[tuple[str, str, tuple[tuple[int, int], ...]]]:
    """The fields "prompt", "answer" and "mistakes" of every line, the last a list of [first
    character, end] of the answer; empty if it is right.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has other fields.
    """
    marked: list[tuple[str, str, tuple[tuple[int, int], ...]]] = []
    fields = _fields(path, "prompt", "mistakes")
    for (prompt, answer), (_, mistakes) in zip(read_questions(path), fields, strict=True):
        if not answer:
            raise InvalidRequestError(f"{path}: the answer to {prompt!r} is empty")
        spans: list[tuple[int, int]] = []
        for one in mistakes if isinstance(mistakes, list) else [mistakes]:
            numbers: list[Any] = one if isinstance(one, list) else []
            is_pair = [type(number) for number in numbers] == [int, int]
            if not (is_pair and 0 <= numbers[0] < numbers[1] <= len(answer)):
                raise InvalidRequestError(
                    f"{path}: the mistake {one!r} is not [first character, end] within an answer"
                    f" of {len(answer)} characters"
                )
            spans.append((numbers[0], numbers[1]))
        marked.append((prompt, answer, tuple(spans)))
    return marked


def read_texts(path: Path) -> list[str]:
    """The lines of a file that are not blank. Raises `InvalidRequestError` as `read_text` does."""
    return [line for line in read_text(path).splitlines() if line.strip()]


def read_text(path: Path) -> str:
    """The content of a file.

    Raises:
        InvalidRequestError: The file cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None


def read_labels(path: Path) -> list[tuple[str, bool]]:
    """The fields "text" and "label", true, false, 1 or 0, of every line.

    Raises:
        InvalidRequestError: The file cannot be read, or a line has other fields.
    """
    pairs = []
    for text, label in _fields(path, "text", "label"):
        if not isinstance(text, str) or not text.strip() or label not in (0, 1):
            raise InvalidRequestError(
                f"{path}: {text!r} with the label {label!r} is no text with the label 0 or 1"
            )
        pairs.append((text, bool(label)))
    return pairs


def _fields(path: Path, first: str, second: str) -> list[tuple[object, object]]:
    try:  # line separators of Unicode may occur within a line
        lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
        return [(one[first], one[second]) for one in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read as JSON lines with the fields {first} and {second}: {error}"
        ) from None

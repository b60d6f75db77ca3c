"""Files of prompts with solutions or numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.training.pairs import read_numbers, read_solutions


def test_solutions(tmp_path: Path) -> None:
    path = tmp_path / "solutions.jsonl"
    path.write_text('{"prompt": "a\u2028", "canonical_solution": "b", "task_id": 1}\n\n', "utf-8")
    assert read_solutions(path) == [("a\u2028", "b")]
    for text in ("nothing", '{"prompt": "a"}', "[]"):
        path.write_text(text, "utf-8")
        with pytest.raises(InvalidRequestError, match="fields prompt and canonical_solution"):
            read_solutions(path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_solutions(tmp_path / "missing.jsonl")


def test_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"prompt": "a", "number": 1.5}\n{"prompt": "b", "number": -2}\n', "utf-8")
    assert read_numbers(path) == [("a", 1.5), ("b", -2.0)]
    for value, message in (
        ("NaN", "nan is not a finite"),
        ('"3"', "'3' is not a number"),
        ("true", "True is not a number"),
        ("1e999", "inf is not a finite"),
    ):
        path.write_text(f'{{"prompt": "a", "number": {value}}}', "utf-8")
        with pytest.raises(InvalidRequestError, match=message):
            read_numbers(path)

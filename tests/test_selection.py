"""The options that select tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conftest import part_of, pytest_report_header


def config(text: str) -> Any:
    return SimpleNamespace(getoption={"part": text}.__getitem__)


def test_a_part_is_counted_from_one() -> None:
    assert [part_of(config(text)) for text in ("1/1", "2/3", "12/12")] == [(0, 1), (1, 3), (11, 12)]
    assert pytest_report_header(config("1/1")) is None
    assert pytest_report_header(config("2/3")) == "part 2 of 3 of the tests"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/2/3", ""])
def test_a_wrong_part_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--part is I/N"):
        part_of(config(text))

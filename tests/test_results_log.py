"""The log of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.results_log import ResultsLog


def test_values_are_read_by_a_later_run(tmp_path: Path) -> None:
    file = tmp_path / "log"
    ResultsLog(file, {"model": "m"}).write({"a": 1})
    log = ResultsLog(file, {"model": "m"})
    assert log.read(lambda entry: entry["a"]) == [1]
    log.clear()
    assert ResultsLog(file, {"model": "m"}).read(dict) == []


@pytest.mark.parametrize("value", [[], {}, 7])
def test_a_value_that_is_no_result_is_one_line(value: object, tmp_path: Path) -> None:
    ResultsLog(tmp_path / "log", {}).write(value)
    with pytest.raises(InvalidRequestError, match="log holds no results of this benchmark"):
        ResultsLog(tmp_path / "log", {}).read(lambda entry: entry["a"])

"""Output of benchmark results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anydecode.report import split_names, table_console, write_report


def test_names_are_separated_by_commas() -> None:
    assert split_names(" a, b:c=1 ,,d") == ["a", "b:c=1", "d"] and split_names(" ") == []


def test_tables_are_wide_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table_console().print("x" * 140)
    assert capsys.readouterr().out == "x" * 140 + "\n"


def test_json_replaces_or_accompanies_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (None, tmp_path / "x.json", Path("-")):
        write_report({"a": 1}, file, lambda: print("table"))
    assert capsys.readouterr().out == 'table\ntable\n{"a": 1}\n'
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_a_closed_pipe_does_not_lose_the_file(tmp_path: Path) -> None:
    def show() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        write_report({"a": 1}, tmp_path / "x.json", show)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}

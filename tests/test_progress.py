"""Progress on stderr: lines without a terminal, a bar in one."""

from __future__ import annotations

import io
import re
import sys

import pytest

from anydecode import progress as module
from anydecode.progress import duration, note, progress, status


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_steps_are_lines_with_an_estimate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("methods", 4) as bar:
        for name in ("a", "b", "c", "d"):
            bar.begin(name)
            clock.now += 60.0
            bar.advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "0 of 4 methods: a, 0 s",
        "1 of 4 methods: a, 60 s, about 3 min left",
        "1 of 4 methods: b, 60 s, about 3 min left",
        "2 of 4 methods: b, 2 min, about 2 min left",
        "2 of 4 methods: c, 2 min, about 2 min left",
        "3 of 4 methods: c, 3 min, about 60 s left",
        "3 of 4 methods: d, 3 min, about 60 s left",
        "4 of 4 methods: d, 4 min",
    ]


def test_a_long_step_has_one_line_per_interval(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("requests", 100) as bar:
        bar.begin("round 1")
        for _ in range(100):
            clock.now += module.LINE_SECONDS / 20
            bar.advance()
    counts = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["0", "20", "40", "60", "80", "100"]


def test_work_that_is_restarted_has_its_own_amount_and_times(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("run", 1.0, unit="percent") as bar:
        bar.restart("texts", 0.0)
        clock.now += 300.0
        bar.update(1.0)
        bar.restart("training", 0.5)
        clock.now += 20.0
        bar.update(0.75, detail="loss 2")
    assert capsys.readouterr().err.splitlines() == [
        "0% of texts: 0 s",
        "100% of texts: 5 min",
        "50% of training: 0 s",
        "75% of training: loss 2, 20 s, about 20 s left",
    ]


def test_skipped_work_does_not_count_in_the_estimate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("methods", 10) as bar:
        for _ in range(8):
            bar.advance(skipped=True)
        clock.now += 10.0
        bar.advance()
    assert capsys.readouterr().err.splitlines()[-1] == "9 of 10 methods: 10 s, about 10 s left"


def test_a_resumed_run_is_estimated_from_what_it_did(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("training", 1.0, unit="percent", done=0.5) as bar:
        clock.now += 20.0
        bar.update(0.75, step="diffusion", detail="loss 0.250")
    expected = "75% of training: diffusion, loss 0.250, 20 s, about 20 s left\n"
    assert capsys.readouterr().err == expected


def test_bytes_are_megabytes_of_a_name(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("smollm", unit="bytes") as bar:
        bar.update(0)
        clock.now += 20.0
        bar.update(49_000_000)
        clock.now += 20.0
        bar.update(98_000_000, 98_000_000)
        bar.update(98_000_000, 98_000_000)  # again, while it is checked
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["49.0 MB of smollm: 20 s", "98.0 of 98.0 MB of smollm: 40 s"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (5400.0, "1.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress("methods", 2) as bar:
        for name in ("one[bold]", "a method whose name is longer than its column"):
            bar.begin(name)
            bar.advance()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    *_, last = filter(str.strip, re.split(r"[\r\n]+", text))
    assert last.startswith("a method whose name is long…") and "━" in last
    assert last.rstrip().endswith("2 of 2 methods, 0 s") and len(last) <= 80


def test_a_spinner_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with status("loading"):
        note("a note")
    assert capsys.readouterr() == ("", "a note\n")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with status("loading"):
        pass
    assert "loading" in terminal.getvalue()

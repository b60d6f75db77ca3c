"""Workers that end are started again, and one that cannot be does not stop the others."""

from __future__ import annotations

import time
from typing import Any

import pytest

from anydecode.cluster.launcher import Launcher, LocalWorkers, Place
from anydecode.errors import FleetError
from anydecode.server import logs

PLACES = [Place("mixed-1", "mixed"), Place("mixed-2", "mixed")]


class Process:
    """A worker that runs until its exit code is set."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None
        return self.code


def events_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(logs, "event", lambda name, **fields: found.append((name, fields)))
    return found


def test_a_worker_that_cannot_start_again_is_one_line_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, started, broken = events_of(monkeypatch), [], []

    def start(place: Place) -> Process:
        if place.name in broken:
            raise FleetError("there is no room")
        started.append((place.name, Process()))
        return started[-1][1]

    launcher = Launcher(start)
    launcher.start(PLACES)
    try:
        broken.append("mixed-1")
        started[0][1].code = 1
        _wait_for(lambda: "worker_not_restarted" in dict(events))
        assert dict(events)["worker_not_restarted"] == {
            "worker": "mixed-1",
            "reason": "there is no room",
        }
        started[1][1].code = -9
        _wait_for(lambda: len(started) == 3)
        assert started[2][0] == "mixed-2"
    finally:
        launcher.close()
    assert [name for name, _ in events].count("worker_not_restarted") == 1
    assert started[2][1].code == 0


def test_a_worker_that_cannot_start_at_first_ends_the_others() -> None:
    first = Process()

    def start(place: Place) -> Process:
        if place is PLACES[1]:
            raise FleetError("there is no room")
        return first

    launcher = Launcher(start)
    with pytest.raises(FleetError, match="there is no room"):
        launcher.start(PLACES)
    launcher.close()
    assert first.code == 0


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(FleetError, match="no process could be started: Resource"):
        LocalWorkers([], b"secret")(PLACES[0])


def _wait_for(condition: Any) -> None:
    stop = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < stop, "the condition did not become true"
        time.sleep(0.02)

"""Every integer parameter of every method has bounds: beyond them an error in one line that names
both, within them a run of bounded memory."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.catalogue import Card, Range
from anydecode.errors import InvalidRequestError
from bounded_runs import extremes, integers

HUGE = (10**9, 10**18, 10**5000)
KEYS = sorted(catalogue.entries())
WITH_NUMBERS = [key for key in KEYS if extremes(key)]
#: Methods that one process runs.
BATCHES = [WITH_NUMBERS[start : start + 6] for start in range(0, len(WITH_NUMBERS), 6)]


@pytest.mark.parametrize("key", KEYS)
def test_numbers_beyond_their_bounds_are_refused(key: str) -> None:
    for name, bounds in integers(key).items():
        for value in (bounds.min - 1, bounds.max + 1, -1, *HUGE):
            try:
                catalogue.build(key, **{name: value})
            except InvalidRequestError as error:
                message = str(error)
                assert "\n" not in message and name in message, message
                assert bounds.allows(value) or f"allowed are {bounds}" in message, message
            else:
                assert bounds.allows(value), (name, value)


@pytest.mark.parametrize("key", KEYS)
def test_numbers_for_requests_and_defaults_are_within_the_bounds(key: str) -> None:
    entry = catalogue.find(key)
    parameters = inspect.signature(entry.build).parameters
    assert set(entry.card.bounds) <= set(parameters)
    for name, one in parameters.items():
        bounds, remote = catalogue.bounds(entry, name), entry.card.remote.get(name)
        if bounds is not None:
            assert not isinstance(one.default, int | float) or bounds.allows(one.default)
            if isinstance(remote, Range):
                assert bounds.allows(remote.min) and bounds.allows(remote.max)


@pytest.mark.parametrize("key", [key for key in KEYS if "size" in integers(key)])
def test_a_number_of_drafts_may_be_at_its_bounds(key: str) -> None:
    """A card whose range begins below what the method takes fails."""
    others = {"min_drafts": 1} if key == "specdec++" else {}
    size = integers(key)["size"]
    for value in (size.min, size.max):
        catalogue.build(key, size=value, **others)


def test_bounds_that_a_card_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(
        size: int = 2, share: float = 0.5, free: float = 0.0, is_on: bool | int = True
    ) -> Any:
        return SimpleNamespace()

    bounds = {"size": Range(2, 3), "share": Range(0.25, 1.0)}
    card = Card("x-test", "search", "no paper", "lossy", bounds=bounds)
    monkeypatch.setitem(catalogue.entries(), "x-test", catalogue.Entry(card, build))
    for name, value in (
        ("size", 3), ("size", np.int64(2)), ("share", 1), ("free", -1e300), ("is_on", False),
        ("is_on", 1 << 20),
    ):  # fmt: skip
        catalogue.build("x-test", **{name: value})
    for name, value, allowed in (
        ("size", 4, "2 to 3"), ("size", 1, "2 to 3"), ("size", np.int64(4), "2 to 3"),
        ("share", 0, "0.25 to 1"), ("share", np.float32(2), "0.25 to 1"),
        ("is_on", (1 << 20) + 1, "0 to 1048576"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=f"{name} is .*; allowed are {allowed}$"):
            catalogue.build("x-test", **{name: value})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the limits of Linux")
@pytest.mark.parametrize("keys", BATCHES, ids=" ".join)
def test_runs_at_the_bounds_take_limited_memory(keys: list[str]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("bounded_runs.py")), *keys]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the limits of Linux")
def test_a_run_that_takes_too_much_memory_is_noticed() -> None:
    """Without the bounds, 10**9 takes more memory than there is."""
    program = (
        "import bounded_runs as runs\n"
        "from anydecode.catalogue import Range, find\n"
        "entry = find('copyspec')\n"
        "object.__setattr__(entry.card, 'bounds', {'ngram': Range(1, 10**9)})\n"
        "runs.run_at_bounds('copyspec', {'ngram': Range(1, 10**9)})\n"
    )
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tests
    )
    assert done.returncode != 0 and "ngram = 1000000000" in done.stderr, done.stderr

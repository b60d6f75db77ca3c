"""Runs methods with each of their numbers at its bounds, in memory that is limited: `python
tests/bounded_runs.py KEY...`. Fails if a run ends otherwise than with a text or one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from anydecode import catalogue
from anydecode.catalogue import Range
from anydecode.certification.certify import small_model
from anydecode.decoders.decoder import Decoder
from anydecode.errors import AnydecodeError

#: Memory that a run may add, in bytes, and processor time after which it counts as bounded.
MAX_BYTES, MAX_SECONDS = 1 << 30, 5


def integers(key: str) -> dict[str, Range]:
    """The bounds of the integer parameters of a method."""
    entry = catalogue.find(key)
    found = {
        one.name: catalogue.bounds(entry, one.name)
        for one in catalogue.parameters(key)
        if "int" in one.type.split(" | ")
    }
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def extremes(key: str) -> dict[str, Range]:
    """The bounds of all numbers of a method; of those without bounds, numbers that are as good as
    infinite."""
    entry, found = catalogue.find(key), dict(integers(key))
    for one in catalogue.parameters(key):
        if "float" in one.type.split(" | "):
            found[one.name] = catalogue.bounds(entry, one.name) or Range(-1e300, 1e300)
    return found


def run_at_bounds(key: str, bounds: Mapping[str, Range]) -> None:
    """Run the method with one parameter after the other at its bounds, each in a process.

    Raises:
        AssertionError: A run needs more memory, or fails with another error than one line.
    """
    for name, one in bounds.items():
        for value in {one.min, one.max}:
            child = os.fork()
            if not child:
                os._exit(_attempt(key, name, value))
            status = os.waitpid(child, 0)[1]
            is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (9, 24)  # its time is over
            assert status == 0 or is_slow, f"{key}: {name} = {value}: status {status}"


def _attempt(key: str, name: str, value: float) -> int:
    import resource  # not on Windows

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (used, used + 1))
    try:
        _generate(key, name, value)
    except AnydecodeError as error:
        return int("\n" in str(error))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _generate(key: str, name: str, value: float) -> None:
    built = catalogue.build(key, **{name: value})
    if not isinstance(built, Decoder):
        return
    with small_model(catalogue.find(key).card, built.requirements)[1]() as llm:
        prompts = ["one two three one two", "a"]
        llm.generate(prompts, decoder=built, max_tokens=8, ignore_eos=True, seed=1)


if __name__ == "__main__":
    for key in sys.argv[1:]:
        run_at_bounds(key, extremes(key))

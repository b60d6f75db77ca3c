"""Runs a Python program in a process of its own, under limits of time and memory.

The limits stop programs that run away. They are no protection against a hostile program, which can
still read files and use the network: run untrusted code in a container or a virtual machine.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from anydecode.errors import UnsupportedCombinationError, one_line

#: Seconds that the start of a process may take beyond the limit of the program.
_START_SECONDS = 5.0
#: Bytes that the program may write to its error output, or to any file.
_MAX_OUTPUT = 1 << 16
#: The exit code of a program that has run to its end; one that ends itself earlier has another.
_PASSED = 93
#: Sets the limits in the new process, before the program is compiled: processor time, memory,
#: written files and core dumps.
_PROGRAM = """
import os, resource, sys
seconds, memory, size, code = map(int, sys.argv[1:])
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    limits = (limit, limit + (name == "CPU"))  # at the first, a signal that says why
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), limits)
sys.argv[1:] = []
exec(compile(sys.stdin.read(), "program", "exec"), {"__name__": "__main__"})
os._exit(code)
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended: whether it ran to its end without an exception, and if not, why."""

    passed: bool
    reason: str = ""


def check_supported() -> None:
    """Raise `UnsupportedCombinationError` where processes cannot be limited."""
    if sys.platform != "linux":
        raise UnsupportedCombinationError(
            f"this system is {sys.platform}; the limits of time and memory under which programs are"
            " run need Linux"
        )


def run_python(source: str, seconds: float, memory: int) -> Outcome:
    """Run a program in an empty folder, without the environment's variables and without installed
    packages.

    Args:
        source: The program.
        seconds: Limit of its time.
        memory: Limit of its address space, in bytes.
    """
    limits = [math.ceil(seconds), memory, _MAX_OUTPUT, _PASSED]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(source.encode(), seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"ran longer than {seconds:g} seconds")
        finally:
            _end(process)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode == _PASSED:
        return Outcome(True)
    if process.returncode == -signal.SIGXCPU:
        return Outcome(False, f"ran longer than {seconds:g} seconds")
    return Outcome(False, one_line(lines[-1] if lines else "ended itself"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program with the processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdin is not None:
        process.stdin.close()

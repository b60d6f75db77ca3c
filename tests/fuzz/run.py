"""Fuzzes one surface after the other: `python tests/fuzz/run.py --seconds 30 [SURFACE...]`.

Each surface runs in a process of its own for so many seconds of processor time, those that reach
the kernels with the sanitizers. A finding is a crash, a case of more than `MAX_SECONDS` of
processor time in this process or `MAX_WALL_SECONDS` in all, an error that is not documented, or
memory that grows. Its input is kept in `tests/fuzz/findings/SURFACE`, which the test suite runs
again.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import hashlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
FINDINGS = TESTS / "fuzz" / "findings"
MAX_SECONDS = 5.0
#: Most time that one case may take in all: long, since other processes may hold the processors.
MAX_WALL_SECONDS = 300.0
#: Most memory that one case may take, and by which a process with empty caches may grow after its
#: first third.
MAX_CASE_BYTES, MAX_GROWTH = 512 << 20, 64 << 20
#: Memory is sampled so often in a run.
NUM_SAMPLES = 18
#: Most data of a process without sanitizers, in bytes: larger allocations fail.
MAX_DATA_BYTES = 1 << 30
#: A surface ends after so many crashes.
MAX_CRASHES = 5


def processor_seconds() -> float:
    """Processor time of this process and its ended children."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def resident_bytes() -> int:
    """Resident memory of this process, without the pages of files: the system drops those of
    libraries, and reads them again, as it likes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def unlimited_bytes() -> int:
    """Memory of this process after its caches are emptied, and without the free memory that the
    allocator keeps: values of many sizes that caches replace leave gaps."""
    from anydecode.constraints import byte_cache

    for cache in list(byte_cache._caches):
        cache.clear()
    gc.collect()
    library = ctypes.CDLL(None)
    try:
        allocated = library.__sanitizer_get_current_allocated_bytes
    except AttributeError:  # without AddressSanitizer, which returns no memory to the system
        try:
            library.malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            pass
        return resident_bytes()
    allocated.restype = ctypes.c_size_t
    return int(allocated())


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def keep(surface: str, case: bytes) -> Path:
    """Store a finding's input."""
    path = FINDINGS / surface / hashlib.sha256(case).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)
    return path


class Fuzzer:
    """Runs changed cases of a surface in this process; `report` counts what happened."""

    def __init__(self, name: str, run: Any, surface: Any, current: Path, seed: int) -> None:
        self.name, self.run, self.surface, self.current = name, run, surface, current
        self.random = Random(seed)
        self.seeds = surface.seeds()
        folder = FINDINGS / name
        self.corpus = [*self.seeds, *(file.read_bytes() for file in sorted(folder.glob("*")))]
        self.known: set[Any] = set()
        self.report: dict[str, Any] = {"cases": 0, "findings": [], "longest": 0.0}

    def fuzz(self, seconds: float, wall_seconds: float = math.inf) -> None:
        """Run cases for so many seconds of processor time, or so many in all if these end first."""
        for case in self.seeds:
            self.try_case(case)
        start, wall_start = processor_seconds(), time.monotonic()
        samples: list[tuple[float, int]] = []
        while True:
            used, wall_used = processor_seconds() - start, time.monotonic() - wall_start
            done = max(used / seconds, wall_used / wall_seconds)
            if done >= (len(samples) + 1) / NUM_SAMPLES:
                samples.append((done, unlimited_bytes()))
                start = processor_seconds() - used  # the sample takes no time from the cases
            if done >= 1:
                break
            case = self.surface.mutate(
                self.random, self.random.choice(self.corpus), self.surface.tokens
            )
            self.try_case(case)
            self.report.update(seconds=round(used, 1))
            if self.report["cases"] % 20 == 0:
                self.report["resident"] = resident_bytes() >> 20
                self._write_report()
        sizes = [size for at, size in samples if at >= 1 / 3]
        if sizes[-1] > sizes[0] + MAX_GROWTH:
            grown = f"memory grew from {sizes[0] >> 20} to {sizes[-1] >> 20} MiB"
            self.report["findings"].append(grown)
        self.report["memory"] = [size >> 20 for size in sizes]
        self._write_report()

    def try_case(self, case: bytes) -> None:
        """Run one case under the limits."""
        self.current.write_bytes(case)
        self.report["cases"] += 1
        peak, start = peak_bytes(), time.process_time()
        faulthandler.dump_traceback_later(MAX_WALL_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            self.run(case)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = type(error).__name__, frame.filename, frame.lineno
            if place not in self.known:
                self.known.add(place)
                path = keep(self.name, case)
                self.report["findings"].append(
                    f"{path.name}: {type(error).__name__}: {error}"[:500]
                )
                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
        # As the timer above: without worker processes, which have limits of their own and count
        # when they end, often in another case.
        longest = max(self.report["longest"], time.process_time() - start)
        self.report["longest"] = round(longest, 2)
        if peak_bytes() > peak + MAX_CASE_BYTES:
            path = keep(self.name, case)
            grown = f"{path.name}: took {(peak_bytes() - peak) >> 20} MiB"
            self.report["findings"].append(grown)

    def _write_report(self) -> None:
        self.current.with_suffix(".json").write_text(json.dumps(self.report))


def fuzz_here(name: str, seconds: float, wall_seconds: float, seed: int, current: Path) -> None:
    """Fuzz one surface in this process."""
    sys.path[:0] = [str(TESTS), str(ROOT / "src")]
    from fuzz.surfaces import SURFACES

    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    from anydecode.kernels.library import load_library

    load_library()  # compiled at first use, which no case's limits allow
    surface = SURFACES[name]
    if not surface.is_native:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    with ExitStack() as stack:
        run = stack.enter_context(surface.open())
        Fuzzer(name, run, surface, current, seed).fuzz(seconds, wall_seconds)


def fuzz_in_process(
    name: str, seconds: float, seed: int, is_native: bool, wall_seconds: float = math.inf
) -> list[str]:
    """Fuzz one surface in processes, again after a crash; print a line, and return the findings."""
    findings: list[str] = []
    cases, used, longest, sizes = 0, 0.0, 0.0, []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(MAX_CRASHES):
            current = Path(folder) / f"case-{attempt}"
            wall_left = max(1.0, wall_seconds - (time.monotonic() - start))
            command = [sys.executable, __file__, name, "--seconds", str(max(1.0, seconds - used)),
                       "--wall-seconds", str(wall_left),
                       "--seed", str(seed + attempt), "--here", str(current)]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if is_native:
                command.insert(0, str(ROOT / ".ci" / "with-sanitizers"))
                environment["ASAN_OPTIONS"] = "quarantine_size_mb=16:allocator_may_return_null=1"
            done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, cwd=ROOT)
            sys.stderr.buffer.write(done.stderr)
            stored = current.with_suffix(".json")
            report = json.loads(stored.read_text()) if stored.exists() else {}
            findings += report.get("findings", ())
            cases += report.get("cases", 0)
            used += report.get("seconds", 0.0)
            longest = max(longest, report.get("longest", 0.0))
            sizes = report.get("memory", sizes)
            if done.returncode == 0:
                break
            if not current.exists():
                findings.append(f"did not start: exit {done.returncode}")
                break
            path = keep(name, current.read_bytes())
            reason = {-signal.SIGPROF: "hang", 1: "hang or error"}.get(done.returncode, "crash")
            first = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[0][:200]
            findings.append(
                f"{path.name}: {reason} (exit {done.returncode}), {report.get('resident', 0)} MiB"
                f" resident shortly before: {first}"
            )
    memory = f", memory {sizes[0]} to {sizes[-1]} MiB" if sizes else ""
    print(f"{name}: {cases} cases in {used:.0f} s of processor time, the longest in {longest:g} s"
          f"{memory}; {len(findings)} findings", flush=True)  # fmt: skip
    for finding in findings:
        print(f"  {finding}", flush=True)
    return findings


def main() -> int:
    """Fuzz the surfaces that the arguments name; all without a name."""
    names = (
        "gguf",
        "folders",
        "adapters",
        "drafters",
        "bodies",
        "schemas",
        "patterns",
        "templates",
    )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("surfaces", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time per surface")
    parser.add_argument(
        "--wall-seconds",
        type=float,
        default=math.inf,
        help="seconds per surface in all, after which it ends even if processor time is left",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.surfaces) - set(names):
        parser.error(
            f"unknown surfaces {', '.join(sorted(unknown))}: choose from {', '.join(names)}"
        )
    if options.here is not None:
        fuzz_here(
            options.surfaces[0], options.seconds, options.wall_seconds, options.seed, options.here
        )
        return 0
    native = {"gguf", "folders", "adapters", "drafters"}
    found = [
        finding
        for name in options.surfaces or names
        for finding in fuzz_in_process(
            name, options.seconds, options.seed, name in native, options.wall_seconds
        )
    ]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

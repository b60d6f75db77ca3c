"""`anydecode bench footprint`: what anydecode takes on disk, at start-up and in memory."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from anydecode.benchmarks.compare import seconds_to_serve
from anydecode.benchmarks.footprint_worker import STEPS
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.models.loading import resolve
from anydecode.models.loading.gguf_split import part_names
from anydecode.report import JsonFile, split_names, table_console, write_report

#: Packages below this size are added up in the table.
_MIN_LISTED = 2**20
_MIB = 2**20
_CHUNK = 16 * _MIB
#: The step with which opening a model begins; those after it belong to it too.
_OPENING = STEPS.index("read the file, build the tokenizer")


def installed_sizes(root: str = "anydecode") -> dict[str, int]:
    """Bytes on disk of the package `root` and of all that it requires without extras, by name,
    compiled modules included; the largest first."""
    from packaging.requirements import Requirement

    sizes: dict[str, int] = {}
    names = [root]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in sizes:
            continue
        distribution = importlib.metadata.distribution(name)
        sizes[name] = _size(distribution)
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _size(distribution: importlib.metadata.Distribution) -> int:
    files = {
        Path(str(distribution.locate_file(file))).resolve() for file in distribution.files or ()
    }
    url = distribution.read_text("direct_url.json")
    if url is not None and json.loads(url).get("dir_info", {}).get("editable"):
        files |= set(Path(__file__).parents[1].rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def weight_files(model: Path) -> list[Path]:
    """The files of a model's weights: a GGUF file with all its parts, or those of a folder."""
    if model.is_file():
        return [Path(name) for name in part_names(str(model))]
    return sorted(model.glob("*.safetensors"))


def seconds_to_read(files: list[Path]) -> float:
    """How long it takes to read all bytes of the files, one after the other."""
    buffer = bytearray(_CHUNK)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def run_worker(model: str, threads: int, sequences: int, context: int) -> dict[str, Any]:
    """Start one process; returns what `footprint_worker` prints.

    Raises:
        InvalidRequestError: If the process fails, with its last line.
    """
    settings = {"model": model, "threads": threads, "sequences": sequences, "context": context}
    worker = [sys.executable, "-m", "anydecode.benchmarks.footprint_worker"]
    process = subprocess.run(
        [*worker, repr(time.time()), json.dumps(settings)], capture_output=True, text=True
    )
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or ["no output"]
        raise InvalidRequestError(f"{sequences}x{context} cannot be measured: {reason[0]}")
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def measure(
    model: str, threads: int, settings: list[tuple[int, int]], rounds: int
) -> dict[str, Any]:
    """The report: the packages, the steps to the first token and to a ready server, the reading of
    the weights' bytes alone, and the peak memory of each (number of sequences, prompt tokens) of
    `settings`."""
    run_worker(model, threads, 1, 16)  # compiles kernels and measures costs, once per machine
    files = weight_files(Path(model))
    reads, runs = [], []
    for _ in range(rounds):
        reads.append(seconds_to_read(files))  # just before, so that both find the file in memory
        runs.append(run_worker(model, threads, 1, 16))
    return {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "rounds": rounds,
        "packages": installed_sizes(),
        "steps": {
            step: {
                "seconds": median(run["steps"][step]["seconds"] for run in runs),
                "resident": runs[0]["steps"][step]["resident"],
            }
            for step in STEPS
        },
        "reading": {
            "bytes": sum(file.stat().st_size for file in files),
            "seconds": median(reads),
            "opening_seconds": median(
                sum(run["steps"][step]["seconds"] for step in STEPS[_OPENING:]) for run in runs
            ),
        },
        "server_ready": median(
            seconds_to_serve("anydecode", None, model, threads) for _ in range(rounds)
        ),
        "memory": [
            {"sequences": sequences, "context": context}
            | {
                key: run_worker(model, threads, sequences, context)[key]
                for key in ("peak", "cache")
            }
            for sequences, context in settings
        ],
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the machine and the three tables."""
    from rich.table import Table

    machine, console = report["machine"], table_console()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads;"
        f" {report['model']}, median of {report['rounds']} processes"
    )
    packages = report["packages"]
    table = Table(
        "package", "MiB on disk", box=None, title="the core install", title_justify="left"
    )
    listed = {name: size for name, size in packages.items() if size >= _MIN_LISTED}
    for name, size in listed.items():
        table.add_row(name, f"{size / _MIB:.1f}")
    rest = sum(packages.values()) - sum(listed.values())
    table.add_row(f"{len(packages) - len(listed)} others", f"{rest / _MIB:.1f}")
    table.add_row("all", f"{sum(packages.values()) / _MIB:.1f}")
    console.print(table)
    table = Table("step", "s", "s so far", "MiB after it", box=None, title="to the first token",
                  title_justify="left")  # fmt: skip
    total = 0.0
    for step, values in report["steps"].items():
        total += values["seconds"]
        after = "" if values["resident"] is None else f"{values['resident'] / _MIB:.0f}"
        table.add_row(step, f"{values['seconds']:.3f}", f"{total:.3f}", after)
    console.print(table)
    reading = report["reading"]
    beyond = reading["opening_seconds"] - reading["seconds"]
    print(
        f"from the file to the first token {reading['opening_seconds']:.3f} s; reading its"
        f" {reading['bytes'] / _MIB:.0f} MiB alone {reading['seconds']:.3f} s: {beyond:.3f} s more"
    )
    print(f"a server accepts requests {report['server_ready']:.3f} s after its start\n")
    table = Table("sequences", "prompt tokens", "peak MiB", "keys and values", box=None,
                  title="peak memory", title_justify="left")  # fmt: skip
    for row in report["memory"]:
        sizes = (f"{row[key] / _MIB:.0f}" for key in ("peak", "cache"))
        table.add_row(str(row["sequences"]), str(row["context"]), *sizes)
    console.print(table)


def bench_footprint(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    settings: Annotated[
        str,
        typer.Option(
            "--settings", help="Sequences x prompt tokens whose memory is measured, by commas."
        ),
    ] = "1x64,1x2048,1x8000,16x64,16x1024",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Processes for the times.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the footprint: disk by package, start-up by step, memory by number and length of
    prompts.

    Example: anydecode bench footprint --threads 2 --settings 1x64,16x512
    """
    report = measure(
        str(resolve(model)), threads or usable_cores(), parse_settings(settings), rounds
    )
    write_report(report, json_file, lambda: print_report(report))


def parse_settings(text: str) -> list[tuple[int, int]]:
    """The pairs of `1x64,16x512`. Raises `InvalidRequestError` on another form."""
    found = [re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,6})", part) for part in split_names(text)]
    if not found or None in found:
        raise InvalidRequestError(
            f"--settings {text!r} must be pairs of sequences and prompt tokens, such as 1x64,16x512"
        )
    return [(int(match[1]), int(match[2])) for match in found if match is not None]

"""`anydecode doctor`: a report on this machine and installation, or on what a model computes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from typing import Annotated, Any, NamedTuple

import typer

from anydecode.cli import options
from anydecode.cli.output import output_width, print_json, wrapped
from anydecode.kernels.pages import memory_bytes
from anydecode.machine import cpu_name, usable_cores
from anydecode.version import __version__


class Extra(NamedTuple):
    """What an optional dependency group gives, and its packages."""

    gives: str
    packages: tuple[str, ...]


#: The extras of this package, as in its pyproject.toml.
EXTRAS = {
    "torch": Extra("training, GPTQ and the reference backend", ("torch",)),
    "hf": Extra("models that only transformers implements", ("torch", "transformers")),
    "xgrammar": Extra("xgrammar as engine of constraints", ("xgrammar",)),
    "monitors": Extra("constraints by static analysis of Python code", ("jedi",)),
    "cluster": Extra("workers that Ray starts (cluster up --ray)", ("ray",)),
    "cuda": Extra("kernels for NVIDIA GPUs, on Linux", ("torch", "triton")),
    "telemetry": Extra(
        "traces of the server's requests",
        ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"),
    ),
    "eval": Extra("tasks of lm-evaluation-harness", ("lm-eval",)),
    "images": Extra("images in conversations with a fleet", ("pillow",)),
    "plots": Extra("figures of benchmarks and training (--plot)", ("matplotlib",)),
    "baselines": Extra(
        "other engines to compare with",
        ("torch", "transformers", "llama-cpp-python", "openvino-genai"),
    ),
}
COMPILERS = ("cc", "gcc", "clang", "cl")


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Compare this model with transformers instead: its greedy tokens, and the cause"
            " of each that differs. Takes four bytes of memory per weight.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="With --model: tokens of each answer, at most.")
    ] = 32,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Show the kernels, compiler, threads, memory, GPU, cache folder, models and extras of this
    machine. With --model, tell near-ties of a model from real differences to transformers; the exit
    status is 1 if there is a real one.

    Example: anydecode doctor --model smollm2-135m-instruct
    """
    if model is not None:
        _compare(model, tokens, dtype, threads, json)
        return
    report = collect_report()
    if json:
        print_json(report)
        return
    print_report(report)


def _compare(model: str, tokens: int, dtype: str | None, threads: int | None, json: bool) -> None:
    from anydecode.benchmarks import against_transformers

    report = against_transformers.compare(model, tokens, dtype, threads)
    if json:
        print_json(report)
    else:
        for line in against_transformers.lines(report):
            print(wrapped(line, output_width()))
    if not against_transformers.is_same(report):
        raise typer.Exit(1)


def collect_report() -> dict[str, Any]:
    """All that `doctor` prints, as plain data. Memory is in bytes."""
    return {
        "anydecode": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": _threads(),
        "memory": memory_bytes(),
        "compiler": compiler(),
        **_torch(),
        **_kernels(),
        "cuda": cuda(),
        **_models(),
        "extras": extras(),
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the report in lines that fit the terminal, the extras below each other at its end."""
    width = output_width()
    values = {name.replace("_", " "): value for name, value in report.items() if name != "extras"}
    if report["memory"] is not None:
        values["memory"] = f"{report['memory'] / 2**30:.1f} GiB"
    column = max(map(len, values)) + 2
    for name, value in values.items():
        print(wrapped(_as_line(value), width, f"{name:<{column}}"))
    print("extras")
    column = max(map(len, report["extras"])) + 2
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else "missing"
        print(wrapped(extra["gives"], width, f"  {name:<{column}}{state:<11}"))
        line = _as_line(extra["packages"]) if extra["installed"] else extra["install"]
        print(wrapped(line, width, " " * (column + 2)))


def compiler() -> str | None:
    """The C compiler that a build from source would use; None if there is none."""
    from_environment = os.environ.get("CC")
    candidates = (from_environment, *COMPILERS) if from_environment else COMPILERS
    paths = (shutil.which(candidate.split()[0]) for candidate in candidates)
    return next((path for path in paths if path), None)


def extras() -> dict[str, dict[str, Any]]:
    """What each extra gives, the versions of its packages (None for a missing one), whether all
    are installed, and the command that installs them."""
    found = {}
    for name, extra in EXTRAS.items():
        versions = {package: _version(package) for package in extra.packages}
        found[name] = {
            "gives": extra.gives,
            "installed": None not in versions.values(),
            "packages": versions,
            "install": f"pip install 'anydecode[{name}]'",
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _threads() -> int:
    from anydecode.kernels.native import thread_count

    return thread_count(None)


def _torch() -> dict[str, Any]:
    from anydecode.kernels.host import has_torch

    if not has_torch():
        return {"torch": None, "gpu": []}
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": str(torch.__version__), "gpu": gpus}


def _kernels() -> dict[str, Any]:
    from anydecode.kernels.host import has_torch
    from anydecode.kernels.library import load_library

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = load_library()
    if library is None:
        reason = "; ".join(str(warning.message) for warning in caught) or "no native kernels"
        backend = "reference" if has_torch() else None
        return {"backend": backend, "why": reason, "instruction_set": None}
    reason = "the fastest compiled kernels that this processor supports and that pass their checks"
    return {"backend": "native", "why": reason, "instruction_set": library.variant}


def cuda() -> str:
    """The kernels that `device="cuda"` would use, and why."""
    from anydecode.kernels.cuda.available import is_interpreted, unavailable_reason
    from anydecode.kernels.host import has_torch

    problem = unavailable_reason()
    if problem is None:
        where = "in its interpreter, on the CPU" if is_interpreted() else "on the GPU"
        return f"triton kernels, {where}"
    if has_torch():
        import torch

        if torch.cuda.is_available():
            return f"torch reference: {problem}"
    return f"none: {problem}"


def _models() -> dict[str, Any]:
    from anydecode.folders import default_cache
    from anydecode.models.loading import present

    return {"cache": str(default_cache()), "models": present()}


def _as_line(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items() if entry) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)

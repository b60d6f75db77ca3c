"""`anydecode doctor`: a report on this machine and installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from typing import Any

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.kernels.pages import memory_bytes
from anydecode.machine import cpu_name, usable_cores
from anydecode.version import __version__

OPTIONAL_PACKAGES = (
    "transformers",
    "xgrammar",
    "jedi",
    "httptools",
    "httpx",
    "opentelemetry-sdk",
    "ray",
    "triton",
    "lm-eval",
    "llama-cpp-python",
    "openvino-genai",
)
COMPILERS = ("cc", "gcc", "clang", "cl")


def doctor(json: options.Json = False) -> None:
    """Show the kernels, compiler, threads, memory, GPU, cache folder and models of this machine.

    Example: anydecode doctor --json
    """
    report = collect_report()
    if json:
        print_json(report)
        return
    width = max(map(len, report))
    if report["memory"] is not None:
        report["memory"] = f"{report['memory'] / 2**30:.1f} GiB"
    for name, value in report.items():
        print(f"{name.replace('_', ' '):<{width}}  {_as_line(value)}")


def collect_report() -> dict[str, Any]:
    """All that `doctor` prints, as plain data. Memory is in bytes."""
    return {
        "anydecode": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory": memory_bytes(),
        "compiler": compiler(),
        **_torch(),
        **_kernels(),
        "cuda": cuda(),
        **_models(),
        "packages": packages(),
    }


def compiler() -> str | None:
    """The C compiler that a build from source would use; None if there is none."""
    from_environment = os.environ.get("CC")
    candidates = (from_environment, *COMPILERS) if from_environment else COMPILERS
    paths = (shutil.which(candidate.split()[0]) for candidate in candidates)
    return next((path for path in paths if path), None)


def packages() -> dict[str, str | None]:
    """Versions of the optional packages; None for a missing one."""
    versions: dict[str, str | None] = {}
    for name in OPTIONAL_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"torch": None}
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "gpu": gpus}


def _kernels() -> dict[str, Any]:
    from anydecode.kernels.library import load_library

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = load_library()
    if library is None:
        reason = "; ".join(str(warning.message) for warning in caught) or "no native kernels"
        return {"backend": "reference", "why": reason, "instruction_set": None}
    reason = "the fastest compiled kernels that this processor supports and that pass their checks"
    return {"backend": "native", "why": reason, "instruction_set": library.variant}


def cuda() -> str:
    """The kernels that `device="cuda"` would use, and why."""
    import torch

    from anydecode.kernels.cuda.available import is_interpreted, unavailable_reason

    problem = unavailable_reason()
    if problem is None:
        where = "in its interpreter, on the CPU" if is_interpreted() else "on the GPU"
        return f"triton kernels, {where}"
    return f"torch reference: {problem}" if torch.cuda.is_available() else f"none: {problem}"


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

"""Compiles the C kernels into a shared library.

`python -m anydecode.kernels.build [folder]` writes the library into `folder`, or into the package
(for a wheel) without one. Otherwise it is built at first use, see `library_cache.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"

_FLAGS = "-std=gnu11 -O3 -fPIC -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wall".split()
#: Flags with which the compiler may change sums and fuse products, so that results depend on the
#: machine: `bench kernels --fast-math` compares.
FAST_MATH_FLAGS = [
    *(flag for flag in _FLAGS if flag != "-ffp-contract=off"),
    *("-ffast-math", "-fno-finite-math-only", "-DANYDECODE_FAST_MATH"),
]
_AVX2 = "-mavx2 -mfma -mf16c".split()
_AVX512 = "-mavx512f -mavx512vl -mavx512bw -mavx512vnni -mprefer-vector-width=256".split()
_VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx512vnni": [*_AVX2, *_AVX512],
        "avxvnni": [*_AVX2, "-mavxvnni"],
        "avx2": _AVX2,
    },
    "aarch64": {
        "neon_dot": ["-march=armv8.2-a+dotprod"],
        "neon": [],
    },
}
# zig has another name for one option. By default it adds debug symbols, with paths of the build
# machine, to the objects and to parts of the C library; two flags prevent that.
_ZIG_OPTIONS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}
_ZIG_FLAGS = ["-g0"]
_ZIG_LINK_FLAGS = ["-s"]
_MACHINES = {"x86_64": "x86_64", "AMD64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


#: Platform tags of wheels and the targets of `zig cc` that build them, on any machine.
TARGETS = {
    "manylinux_2_17_x86_64.manylinux2014_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64.manylinux2014_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
    "win_arm64": "aarch64-windows-gnu",
}


def library_name(target: str = "") -> str:
    """The file name of the library on this platform, or on a target of `zig cc`."""
    endings = {"darwin": "dylib", "macos": "dylib", "win32": "dll", "windows": "dll"}
    system = target.split("-")[1].split(".")[0] if target else sys.platform
    return f"libanydecode.{endings.get(system, 'so')}"


def compile_for(tag: str, folder: Path, sources: Path = SOURCES) -> Path:
    """Cross-compile the library for a platform tag of `TARGETS` with the `ziglang` package.

    Raises:
        RuntimeError: The compiler fails.
    """
    target = TARGETS[tag]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    return compile_library(
        folder / library_name(target), compiler, sources, machine=target.split("-")[0]
    )


def find_compiler() -> list[str] | None:
    """The command of a C compiler ($CC, cc, gcc, clang, the `ziglang` package), or None."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def build_key(compiler: Sequence[str], sources: Path = SOURCES) -> str:
    """A hash of all inputs of a build for this machine."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    digest.update(
        repr((_FLAGS, _VARIANTS, local_variants(), _machine(), compiler)).encode() + version
    )
    return digest.hexdigest()[:24]


def local_variants() -> tuple[str, ...]:
    """The variants that this processor supports; all of its architecture where that is unknown."""
    available = tuple(_VARIANTS.get(_machine(), {}))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return available
    flags = set(text.split())
    required = {"avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "neon_dot": "asimddp"}
    return tuple(name for name in available if name not in required or required[name] in flags)


def _units(
    machine: str, sources: Path, variants: Collection[str] | None
) -> list[tuple[str, list[str]]]:
    """(source, extra flags) of every object file, the slowest to compile first."""
    available = _VARIANTS.get(machine, {})
    chosen = [name for name in available if variants is None or name in variants]
    variant = str(sources / "variant.c")
    units = [(variant, [f"-DVARIANT={name}", *available[name]]) for name in chosen]
    # Above -O1 gcc needs minutes for the plain C variant, which need not be fast.
    units.append((variant, ["-DVARIANT=scalar", "-DANYDECODE_SCALAR", "-O1"]))
    units.append((str(sources / "api.c"), [f"-DWITH_{name}" for name in chosen]))
    return [*units, *((str(sources / name), []) for name in ("check.c", "plan.c", "threads.c"))]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()}\n{shlex.join(command)}")


def compile_library(
    target: Path,
    compiler: Sequence[str],
    sources: Path = SOURCES,
    machine: str | None = None,
    flags: Sequence[str] = _FLAGS,
    variants: Collection[str] | None = None,
) -> Path:
    """Compile and link `target`. The file is created only if everything succeeds.

    Args:
        target: The library to write.
        compiler: Command of the compiler.
        sources: Folder of the C sources.
        machine: Architecture to compile for; None: this machine's.
        flags: Flags of every object file.
        variants: Which of the architecture's variants to include; None: all.

    Raises:
        RuntimeError: The compiler fails; the error has its output.
    """
    machine = machine or _machine()
    renamed = _ZIG_OPTIONS if "ziglang" in compiler else {}
    flags = [*flags, *_ZIG_FLAGS] if "ziglang" in compiler else flags
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        commands, objects = [], []
        for index, (source, extra) in enumerate(_units(machine, sources, variants)):
            objects.append(str(Path(folder) / f"{index}.o"))
            options = [renamed.get(flag, flag) for flag in (*flags, *extra)]
            commands.append([*compiler, *options, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / target.name
        libraries = [] if target.suffix == ".dll" else ["-lm", "-pthread"]
        if "ziglang" in compiler:
            libraries += _ZIG_LINK_FLAGS
        if target.suffix == ".dylib":  # its default install name is the path of the build folder
            libraries.append(f"-Wl,-install_name,@rpath/{target.name}")
        _run([*compiler, "-shared", "-o", str(linked), *objects, *libraries])
        os.replace(linked, target)
    return target


def main() -> None:
    """Build into the folder given on the command line, or into the package."""
    compiler = find_compiler()
    if compiler is None:
        sys.exit("no C compiler was found (set CC, or install the ziglang package)")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES
    try:
        print(compile_library(folder / library_name(), compiler))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

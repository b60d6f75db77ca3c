"""Compiles the C kernels into one shared library, once per source, flags and compiler.

`python -m anydecode.kernels.build [folder]` writes the library there (into the package, for a
wheel, when no folder is given); otherwise it is built at first use into the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"

_FLAGS = "-std=gnu11 -O3 -fPIC -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wall".split()
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
# What zig calls otherwise; and it adds symbols for a debugger unless told not to, to our objects
# and to parts of the C library, with the paths of the machine that builds.
_ZIG_WORDS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}
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
    """The library for the wheel with this tag of `TARGETS`, cross-compiled by the `ziglang`
    package. Raises RuntimeError where it fails."""
    target = TARGETS[tag]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    return compile_library(
        folder / library_name(target), compiler, sources, machine=target.split("-")[0]
    )


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC, cc, gcc, clang, or that of the `ziglang` package."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def cache_folder() -> Path:
    """Where libraries built at first use are kept."""
    # Imported late: a build hook runs this file by itself, before there is a package.
    from anydecode.folders import default_cache

    return default_cache() / "kernels"


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def local_variants() -> tuple[str, ...]:
    """The variants that this processor may run; all of its kind where it does not tell."""
    known = tuple(_VARIANTS.get(_machine(), {}))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return known
    flags = set(text.split())
    needs = {"avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "neon_dot": "asimddp"}
    return tuple(name for name in known if name not in needs or needs[name] in flags)


def _units(
    machine: str, sources: Path, variants: Collection[str] | None
) -> list[tuple[str, list[str]]]:
    """(source, extra flags) of every object file, the slowest to compile first."""
    known = _VARIANTS.get(machine, {})
    chosen = [name for name in known if variants is None or name in variants]
    variant = str(sources / "variant.c")
    units = [(variant, [f"-DVARIANT={name}", *known[name]]) for name in chosen]
    # gcc takes minutes over plain C at more than -O1, and nothing of it needs to be fast.
    units.append((variant, ["-DVARIANT=scalar", "-DANYDECODE_SCALAR", "-O1"]))
    units.append((str(sources / "api.c"), [f"-DWITH_{name}" for name in chosen]))
    return [*units, *((str(sources / name), []) for name in ("check.c", "plan.c", "threads.c"))]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr.strip()}")


def compile_library(
    target: Path,
    compiler: Sequence[str],
    sources: Path = SOURCES,
    machine: str | None = None,
    flags: Sequence[str] = _FLAGS,
    variants: Collection[str] | None = None,
) -> Path:
    """Compile and link `target`, which appears whole or not at all. `variants`: which of the
    machine's to include; all when None.

    Raises RuntimeError with the compiler's words where it fails.
    """
    machine = machine or _machine()
    words = _ZIG_WORDS if "ziglang" in compiler else {}
    flags = [*flags, *_ZIG_FLAGS] if "ziglang" in compiler else flags
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        commands, objects = [], []
        for index, (source, extra) in enumerate(_units(machine, sources, variants)):
            objects.append(str(Path(folder) / f"{index}.o"))
            options = [words.get(word, word) for word in (*flags, *extra)]
            commands.append([*compiler, *options, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / target.name
        last = [] if target.suffix == ".dll" else ["-lm", "-pthread"]
        if "ziglang" in compiler:
            last += _ZIG_LINK_FLAGS
        if target.suffix == ".dylib":  # which otherwise names itself by the folder it is linked in
            last.append(f"-Wl,-install_name,@rpath/{target.name}")
        _run([*compiler, "-shared", "-o", str(linked), *objects, *last])
        os.replace(linked, target)
    return target


def _fingerprint(compiler: Sequence[str], sources: Path) -> str:
    """A hash of everything the library depends on."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    digest.update(
        repr((_FLAGS, _VARIANTS, local_variants(), _machine(), compiler)).encode() + version
    )
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time builds; where files cannot be locked, each builds its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_library(sources: Path = SOURCES) -> Path | None:
    """The library of a wheel, or of the cache, built if need be; None where nothing compiles it.

    Raises RuntimeError where a compiler is there but fails.
    """
    shipped = sources / library_name()
    if shipped.exists():
        return shipped
    compiler = find_compiler()
    if compiler is None:
        return None
    folder = cache_folder() / _fingerprint(compiler, sources)
    target = folder / library_name()
    if not target.exists():
        with _locked(folder / "lock"):
            if not target.exists():
                compile_library(target, compiler, sources, variants=local_variants())
    return target


def main() -> None:
    """Build into the folder named on the command line, or into the package."""
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

"""The path of the kernels' library: that of the package, or one built at first use.

Loading a library runs its code. A library that was built at first use is therefore loaded only if
its SHA-256 is the one stored beside it, and if the library, the hash and their folder belong to
this user (or to root) and nobody else can write them. Otherwise it is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from anydecode.folders import default_cache, move_durably
from anydecode.kernels.build import (
    SOURCES,
    build_key,
    compile_library,
    find_compiler,
    library_name,
    local_variants,
)
from anydecode.progress import note

_HAS_OWNERS = hasattr(os, "geteuid")  # False on Windows, where the user's profile is private
_WRITABLE_BY_OTHERS = 0o022 if _HAS_OWNERS else 0
#: Prefix of the names of the folders in which libraries are built.
_PREFIX = "build-"
#: A build takes less disk space than this, in bytes.
_MAX_BUILD_BYTES = 64 << 20


def built_library(sources: Path = SOURCES) -> Path | None:
    """The library of the package, or an intact one of the cache, built if there is none.

    Where the cache folder cannot be used (it cannot be written, belongs to another user, is mounted
    `noexec`, or its disk is full), a folder of this user among the temporary files takes its place,
    with a warning.

    Returns:
        Its path; None where there is no library and no compiler.

    Raises:
        RuntimeError: The compiler fails, or no folder can be used.
    """
    packaged = sources / library_name()
    if packaged.exists():
        return packaged
    compiler = find_compiler()
    if compiler is None:
        return None
    key, problems = build_key(compiler, sources), []
    for folder in _folders():
        try:
            _make_private(folder)
            path = _library_in(folder / key, compiler, sources)
        except OSError as error:
            problems.append(f"{folder} cannot be used: {error.strerror or error}")
            continue
        if problems:
            warnings.warn(f"{'; '.join(problems)}; the kernels are in {folder}", stacklevel=4)
        return path
    raise RuntimeError("; ".join(problems))


def _folders() -> Iterator[Path]:
    """The folders for libraries, the preferred one first."""
    yield default_cache() / "kernels"
    if _HAS_OWNERS:
        yield Path(tempfile.gettempdir()) / f"anydecode-kernels-{os.geteuid()}"


def _library_in(folder: Path, compiler: Sequence[str], sources: Path) -> Path:
    """The intact library in `folder`, built if there is none."""
    _make_private(folder)
    target = folder / library_name()
    if not _is_intact(target):
        with _locked(folder / "lock") as is_alone:
            if not _is_intact(target):
                for left in folder.glob(f"{_PREFIX}*") if is_alone else ():
                    shutil.rmtree(left, ignore_errors=True)  # by processes that were killed
                _build(target, compiler, sources)
    return target


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can write, or withdraw the permission of others.

    Raises:
        OSError: It cannot be created, belongs to another user, or its files cannot be run.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    info = folder.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise OSError("it is not a folder")
    if not _is_trusted(info) or not _is_trusted(folder.lstat()):  # itself, if it is a link
        raise OSError("it belongs to another user")
    if info.st_mode & _WRITABLE_BY_OTHERS:
        folder.chmod(0o755)
    if _HAS_OWNERS and os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError("it is mounted noexec")


def _is_trusted(info: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or to root."""
    return not _HAS_OWNERS or info.st_uid in (0, os.geteuid())


def _is_intact(library: Path) -> bool:
    """Whether only this user could have written a library and its hash, and the hash is right."""
    try:
        for path in (library, _hash_file(library)):
            info = path.lstat()
            is_file = stat.S_ISREG(info.st_mode)
            if not is_file or not _is_trusted(info) or info.st_mode & _WRITABLE_BY_OTHERS:
                return False
        return _hash_file(library).read_bytes() == _hash(library)
    except OSError:
        return False


def _hash_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _hash(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def _build(target: Path, compiler: Sequence[str], sources: Path) -> None:
    """Compile the library and its hash, and move both to their places when they are on the disk."""
    note("building the kernels for this machine, which happens once")
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as folder:
        built = Path(folder) / target.name
        try:
            compile_library(built, compiler, sources, variants=local_variants())
        except RuntimeError:
            if shutil.disk_usage(folder).free < _MAX_BUILD_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise
        _hash_file(built).write_bytes(_hash(built))
        for path in (_hash_file(built), built):
            path.chmod(0o755)
            move_durably(path, target.parent / path.name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock, so that one process builds at a time. Yields whether it is held: there is
    none where fcntl is missing."""
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:
            yield False
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True

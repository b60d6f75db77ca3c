"""The cache of built kernels: a library is loaded only if nobody else can have changed it."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.kernels import library, library_cache
from anydecode.kernels.library_cache import built_library

BUILT = b"a library"
OTHER_USER = 54321
needs_owners = pytest.mark.skipif(sys.platform == "win32", reason="files have no owners here")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The paths of the libraries that were built, into the folder `tmp_path / "home"`."""
    paths: list[Path] = []

    def compile_library(target: Path, *arguments: Any, **options: Any) -> Path:
        target.write_bytes(BUILT)
        target.chmod(0o775)
        paths.append(target)
        return target

    monkeypatch.setattr(library_cache, "compile_library", compile_library)
    monkeypatch.setattr(library_cache, "find_compiler", lambda: ["cc"])
    monkeypatch.setattr(library_cache, "build_key", lambda *arguments: "key")
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return paths


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def build(tmp_path: Path) -> Path:
    """The built library; the sources contain none."""
    path = built_library(tmp_path)
    assert path is not None and path.read_bytes() == BUILT
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` a file or folder of another user."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, -1)
        return
    lstat = Path.lstat

    def changed(self: Path) -> Any:
        found = lstat(self)
        return SimpleNamespace(st_mode=found.st_mode, st_uid=OTHER_USER) if self == path else found

    monkeypatch.setattr(Path, "lstat", changed)


def test_an_intact_library_is_built_once(builds: list[Path], tmp_path: Path) -> None:
    assert build(tmp_path) == build(tmp_path)
    assert len(builds) == 1
    assert build(tmp_path).is_relative_to(tmp_path / "home" / "kernels")


@needs_owners
def test_what_a_killed_build_left_is_removed(builds: list[Path], tmp_path: Path) -> None:
    path = build(tmp_path)
    left = path.parent / builds[0].parent.name  # where the library was built
    left.mkdir()
    (left / "1.o").write_bytes(BUILT)
    path.unlink()
    build(tmp_path)
    assert not left.exists()


@needs_owners
def test_nobody_else_can_write_what_was_built(builds: list[Path], tmp_path: Path) -> None:
    path = build(tmp_path)
    for one in (path, path.with_name(f"{path.name}.sha256"), path.parent, path.parent.parent):
        assert not one.stat().st_mode & 0o022


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(BUILT[:-1]),
        lambda path: path.write_bytes(b"something else"),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_name(f"{path.name}.sha256").unlink(),
        lambda path: path.with_name(f"{path.name}.sha256").write_bytes(b"\xff"),
    ],
)
def test_a_damaged_library_is_built_again(
    damage: Callable[[Path], Any], builds: list[Path], tmp_path: Path
) -> None:
    damage(build(tmp_path))
    build(tmp_path)
    build(tmp_path)
    assert len(builds) == 2


@needs_owners
@pytest.mark.parametrize("suffix", ["", ".sha256"])
def test_a_library_that_others_can_write_is_built_again(
    suffix: str, builds: list[Path], tmp_path: Path
) -> None:
    path = build(tmp_path)
    for mode in (0o775, 0o757):
        path.with_name(path.name + suffix).chmod(mode)
        build(tmp_path)
        assert stat.S_IMODE(path.with_name(path.name + suffix).stat().st_mode) == 0o755
    assert len(builds) == 3


@needs_owners
def test_a_library_of_another_user_is_built_again(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    path = build(tmp_path)
    give_away(path, monkeypatch)
    build(tmp_path)
    assert len(builds) == 2


@needs_owners
def test_a_link_is_not_a_library(builds: list[Path], tmp_path: Path) -> None:
    path = build(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not build(tmp_path).is_symlink()
    assert len(builds) == 2


@needs_owners
def test_others_lose_the_permission_to_write_the_folder(builds: list[Path], tmp_path: Path) -> None:
    folder = build(tmp_path).parent
    folder.chmod(0o777)
    build(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@needs_owners
def test_a_folder_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    give_away(build(tmp_path).parent, monkeypatch)
    with pytest.warns(UserWarning, match="belongs to another user; the kernels are in"):
        path = build(tmp_path)
    assert path.is_relative_to(tmp_path / "temporary" / f"anydecode-kernels-{os.geteuid()}")


@needs_owners
def test_a_noexec_mount_is_not_used(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"

    def statvfs(folder: Path) -> Any:
        return SimpleNamespace(f_flag=8 if Path(folder).is_relative_to(home) else 0)

    monkeypatch.setattr(os, "ST_NOEXEC", 8, raising=False)
    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.warns(UserWarning, match="is mounted noexec") as caught:
        path = build(tmp_path)
    assert path.is_relative_to(tmp_path / "temporary")
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def failing(*arguments: Any, **options: Any) -> Path:
    raise RuntimeError("variant.c:1:2: error: something\n 1 | x\ncc -c variant.c")


@needs_owners
def test_a_full_disk_is_not_used(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    """Rejects a failed build where the compiler cannot write what it compiles."""
    home, compile_library = tmp_path / "home", library_cache.compile_library

    def compiled(target: Path, *arguments: Any, **options: Any) -> Path:
        on_full_disk = target.is_relative_to(home)
        return (failing if on_full_disk else compile_library)(target, *arguments, **options)

    def disk_usage(folder: str) -> Any:
        return SimpleNamespace(free=4096 if Path(folder).is_relative_to(home) else 1 << 40)

    monkeypatch.setattr(library_cache, "compile_library", compiled)
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.warns(UserWarning, match="No space left on device; the kernels are in") as caught:
        assert build(tmp_path).is_relative_to(tmp_path / "temporary")
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_the_errors_of_a_compiler_are_one_line(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(library_cache, "compile_library", failing)
    monkeypatch.setattr(library, "built_library", lambda: built_library(tmp_path))
    with pytest.warns(
        UserWarning, match="could not be built: variant.c.* error: something"
    ) as caught:
        assert library.load_library.__wrapped__() is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


@needs_owners
def test_without_a_folder_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file")
    (tmp_path / "temporary").rmdir()
    (tmp_path / "temporary").write_text("a file")
    monkeypatch.setattr(library, "built_library", lambda: built_library(tmp_path))
    with pytest.warns(UserWarning, match="could not be built: .*cannot be used") as caught:
        assert library.load_library.__wrapped__() is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert not builds


def test_files_are_on_the_disk_before_they_are_renamed(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    synced: list[int] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def checked_replace(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", checked_replace)
    folder = build(tmp_path).parent
    assert sys.platform == "win32" or folder.stat().st_ino in synced


def test_a_changed_library_is_never_loaded(
    monkeypatch: pytest.MonkeyPatch, builds: list[Path], tmp_path: Path
) -> None:
    build(tmp_path).write_bytes(b"code of somebody else")
    loaded: list[bytes] = []

    def load(path: str) -> Any:
        loaded.append(Path(path).read_bytes())
        raise OSError("not loaded here")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(library, "built_library", lambda: built_library(tmp_path))
    with pytest.warns(UserWarning, match="not loaded here"):
        assert library.load_library.__wrapped__() is None
    assert loaded == [BUILT]

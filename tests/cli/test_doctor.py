"""`anydecode doctor`: the extras, and lines that fit a terminal."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from anydecode.cli import doctor, main
from anydecode.kernels import library, library_cache
from anydecode.models.loading.names import PACKAGED


def print_doctor(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(["doctor", *arguments])
    assert ended.value.code == 0


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matplotlib and transformers are installed."""
    installed = {"matplotlib": "3.9", "transformers": "5.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_extras_are_those_of_the_package(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    groups = re.findall(r"^([\w-]+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    requirements = {
        name: [Requirement(one) for one in re.findall(r'"([^"]+)"', packages)]
        for name, packages in groups
    }

    def packages_of(name: str) -> set[str]:
        """The packages of an extra, with those of the extras that it includes."""
        return {
            package
            for one in requirements[name]
            for package in (
                {one.name}
                if one.name != "anydecode"
                else set().union(*map(packages_of, one.extras))
            )
        }

    declared = {
        name: packages_of(name)
        for name in requirements
        if name not in ("test", "test-core", "clients", "inspect", "dev", "docs")
    }
    assert declared == {name: set(extra.packages) for name, extra in doctor.EXTRAS.items()}


def test_each_extra_says_what_to_install(
    versions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_doctor("--json")
    extras = json.loads(capsys.readouterr().out)["extras"]
    assert set(extras) == set(doctor.EXTRAS)
    assert extras["plots"] == {
        "gives": "figures of benchmarks and training (--plot)",
        "installed": True,
        "packages": {"matplotlib": "3.9"},
        "install": "pip install 'anydecode[plots]'",
    }
    assert not extras["baselines"]["installed"]  # only one of its packages is
    assert extras["baselines"]["packages"]["transformers"] == "5.0"
    print_doctor()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    after = dict(zip(lines, lines[1:], strict=False))
    shown = next(line for line in lines if line.startswith("plots"))
    assert shown.split()[1] == "installed" and after[shown] == "matplotlib 3.9"
    shown = next(line for line in lines if line.startswith("baselines"))
    assert shown.split()[1] == "missing"
    assert after[shown] == "pip install 'anydecode[baselines]'"


def test_lines_fit_80_columns(
    versions: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except for a path that is longer, which can then be copied."""
    path = "/" + 90 * "x"
    monkeypatch.setattr(doctor, "_models", lambda: {"cache": path, "models": ["model"] * 40})
    print_doctor()
    lines = capsys.readouterr().out.splitlines()
    long = [line for line in lines if len(line) > 80]
    assert len(lines) > 30 and [line.split()[-1] for line in long] == [path]


def _is_a_file(cache: Path) -> None:
    cache.write_bytes(b"no folder")


def _is_a_loop(cache: Path) -> None:
    cache.symlink_to(cache)


def _is_a_link_to_nothing(cache: Path) -> None:
    cache.symlink_to(cache.with_name("missing"))


def _has_files_for_folders(cache: Path) -> None:
    cache.mkdir()
    for name in ("models", "kernels", "costs"):
        (cache / name).write_bytes(b"no folder")


def _has_folders_for_files(cache: Path) -> None:
    for file in _files(cache):
        file.mkdir(parents=True)


def _has_loops(cache: Path) -> None:
    for file in _files(cache):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(file.name)


def _has_garbage(cache: Path) -> None:
    for file in _files(cache):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\xff" * 64)


def _files(cache: Path) -> list[Path]:
    """The files of the folder: the models, the kernels and the hash of the kernels."""
    models = [cache / "models" / one.name / Path(one.member).name for one in PACKAGED.values()]
    built = cache / "kernels" / "key" / library_cache.library_name()
    return [*models, built, built.with_name(f"{built.name}.sha256")]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler writes a file that is no library."""

    def compile_library(target: Path, *arguments: Any, **options: Any) -> None:
        target.write_bytes(b"no library")

    monkeypatch.setattr(library_cache, "compile_library", compile_library)
    monkeypatch.setattr(library_cache, "find_compiler", lambda: ["cc"])
    monkeypatch.setattr(library_cache, "build_key", lambda *arguments: "key")
    monkeypatch.setattr(library, "built_library", lambda: library_cache.built_library(tmp_path))
    monkeypatch.setattr(library, "load_library", library.load_library.__wrapped__)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def report_of(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """What `doctor --json` prints; without the option, it ends well too."""
    monkeypatch.setenv("ANYDECODE_HOME", str(cache))
    print_doctor()
    assert capsys.readouterr().out.startswith("anydecode")
    print_doctor("--json")
    report = json.loads(capsys.readouterr().out)
    assert report["models"] == [] and report["instruction_set"] is None
    return report


@pytest.mark.one_in(3)
@pytest.mark.skipif(sys.platform == "win32", reason="links need a permission there")
@pytest.mark.parametrize(
    "make",
    [
        _is_a_file, _is_a_loop, _is_a_link_to_nothing, _has_files_for_folders,
        _has_folders_for_files, _has_loops, _has_garbage,
    ],
)  # fmt: skip
def test_any_cache_folder_is_reported(
    make: Callable[[Path], None],
    no_kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "home")
    assert report_of(tmp_path / "home", monkeypatch, capsys)["cache"] == str(tmp_path / "home")


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are texts there")
@pytest.mark.parametrize("name", ["a\udcff", "a" * 5000], ids=["no text", "too long"])
def test_any_name_of_the_cache_folder_is_reported(
    name: str,
    no_kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = report_of(tmp_path / name, monkeypatch, capsys)
    assert report["cache"] == str(tmp_path / name)


def test_a_cache_folder_that_cannot_be_read_is_reported(
    no_kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Permissions do not bind root, so the system's answer is replaced."""

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.is_relative_to(tmp_path / "home"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return refuse

    monkeypatch.setattr(Path, "stat", refusing(Path.stat))
    monkeypatch.setattr(Path, "mkdir", refusing(Path.mkdir))
    report = report_of(tmp_path / "home", monkeypatch, capsys)
    assert "kernels cannot be used: Permission denied" in report["why"]

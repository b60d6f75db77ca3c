"""`anydecode doctor`: the extras, and lines that fit a terminal."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from anydecode.cli import doctor, main


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

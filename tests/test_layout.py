"""Where things live: a method is a file of its own name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anydecode import catalogue


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_a_method_is_registered_in_the_module_of_its_name(key: str) -> None:
    build = catalogue.entries()[key].build
    assert build.__module__.rpartition(".")[2] == catalogue.module_name(key), key


@pytest.mark.parametrize(
    "key, name",
    [
        ("min-p", "min_p"),
        ("specdec++", "specdecpp"),
        ("lambda", "lambda_"),
    ],
)
def test_a_module_name_is_an_identifier(key: str, name: str) -> None:
    assert catalogue.module_name(key) == name


def test_a_method_is_found_without_importing_the_others() -> None:
    program = (
        "import sys; from anydecode import catalogue; catalogue.build('prompt-lookup');"
        "catalogue.build('min-p');"
        "print([name for name in sys.modules if 'diffusion' in name or 'beam' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_broken_entry_point_is_left_out_with_one_line(tmp_path: Path) -> None:
    info = tmp_path / "broken-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[anydecode.decoders]\nx = no_such_module:X\n")
    paths = [str(tmp_path), os.environ["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, "-m", "anydecode", "methods", "beam"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "beam" in done.stdout
    program = "from anydecode import catalogue; print(len(catalogue.entries()) > 100)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n"
    assert "entry point 'no_such_module:X' failed: ModuleNotFoundError" in done.stderr

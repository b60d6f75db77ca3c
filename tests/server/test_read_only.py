"""A server whose root file system is read-only, as the container is told to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.folders import default_cache  # noqa: E402
from anydecode.kernels.library import load_library  # noqa: E402

#: Imported at the start of every process: refuses to write elsewhere, as the system would.
REFUSE = """
import errno, os, sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PLACES = tuple(os.environ["WRITABLE"].split(os.pathsep)) + ("/dev", "/proc")
CHANGES = {
    "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
    "os.truncate", "os.utime", "sqlite3.connect",
}


def refuse(event, arguments):
    is_write = event == "open" and arguments[2] and arguments[2] & WRITES
    if not is_write and event not in CHANGES:
        return
    path = arguments[0]
    if isinstance(path, int) or path == ":memory:":
        return
    path = os.path.abspath(os.fsdecode(path))
    if not any(path == place or path.startswith(place + os.sep) for place in PLACES):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


sys.addaudithook(refuse)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the hook; `models` in it has the compiled kernels, as the wheel has them."""
    if sys.platform == "win32" or load_library() is None:
        pytest.skip("needs the compiled kernels, and paths of POSIX")
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    (tmp_path / "models" / "anydecode").mkdir(parents=True)
    (tmp_path / "models" / "anydecode" / "kernels").symlink_to(default_cache() / "kernels")
    (tmp_path / "temporary").mkdir()
    return tmp_path


@contextmanager
def serving(folder: Path, *writable: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that can write only to these folders in `folder`, and the lines that
    it prints, all of them at the end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "WRITABLE": os.pathsep.join(str(folder / name) for name in writable),
        "TMPDIR": str(folder / "temporary"),
        "XDG_CACHE_HOME": str(folder / "models"),
        "HOME": "/home/missing",
    }
    environment.pop("ANYDECODE_HOME", None)
    command = [sys.executable, "-m", "anydecode", "serve", "tiny-autoregressive", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://[0-9.:]+)", line):
                reader.start()
                yield found[1], lines
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.terminate()
        process.wait(60)
    reader.join(60)


def check_answers(url: str) -> None:
    body = {"prompt": "copy Ada Ben Leo:", "max_tokens": 8}
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        for more in ({}, {"structured_outputs": {"json": {"type": "boolean"}}}):
            answer = http.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_a_server_writes_to_its_volume_only(folder: Path) -> None:
    with serving(folder, "models", "temporary") as (url, lines):
        check_answers(url)
    assert list((folder / "models" / "anydecode" / "costs").iterdir())
    assert not any("not saved" in line or "cannot be used" in line for line in lines), lines


@pytest.mark.slow
def test_a_server_with_a_read_only_volume_says_so_in_one_line(folder: Path) -> None:
    with serving(folder, "temporary") as (url, lines):
        check_answers(url)
    assert not (folder / "models" / "anydecode" / "costs").exists()
    assert sum("the measured costs of passes are not saved" in line for line in lines) == 1, lines

"""The fuzzer keeps the inputs of errors, once for each place in the code."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("resource")
pytest.importorskip("httpx")

from fuzz import run
from fuzz.folders import write_folders
from fuzz.gguf_files import gguf_files
from fuzz.surfaces import SURFACES
from model_files import run_if_valid


def test_errors_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FINDINGS", tmp_path / "findings")
    monkeypatch.setattr(sys, "stderr", open(tmp_path / "errors", "w"))

    def divide(case: bytes) -> None:
        1 / len(case)

    fuzzer = run.Fuzzer("patterns", divide, SURFACES["patterns"], tmp_path / "case", seed=0)
    for case in (b"a", b"", b""):
        fuzzer.try_case(case)
    assert fuzzer.report["cases"] == 3 and len(fuzzer.report["findings"]) == 1
    (kept,) = (tmp_path / "findings" / "patterns").iterdir()
    assert kept.read_bytes() == b""


#: In a process of its own, as the fuzzer runs: another may give memory back meanwhile.
GROWS = """
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[2]]
from fuzz import run
from fuzz.surfaces import SURFACES

run.MAX_GROWTH = 16 << 20
kept = []

def keep(case):
    kept.append(b"x" * (3 << 20))
    start = run.processor_seconds()
    while run.processor_seconds() < start + 0.01:
        pass

run.Fuzzer("patterns", keep, SURFACES["patterns"], Path(sys.argv[3]), seed=0).fuzz(0.6)
"""


@pytest.mark.slow
def test_memory_that_grows_and_the_longest_case_are_reported(tmp_path: Path) -> None:
    case = tmp_path / "case"
    folders = [str(run.TESTS), str(run.ROOT / "src")]
    subprocess.run([sys.executable, "-c", GROWS, *folders, str(case)], check=True)
    report = json.loads(case.with_suffix(".json").read_text())
    (finding,) = report["findings"]
    assert finding.startswith("memory grew from")
    assert len(report["memory"]) > 5 and report["longest"] >= 0.01


def test_the_time_of_an_ended_process_is_not_that_of_the_case_in_which_it_ends(
    tmp_path: Path,
) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"

    def wait(case: bytes) -> None:
        subprocess.run([sys.executable, "-c", busy], check=True)

    fuzzer = run.Fuzzer("patterns", wait, SURFACES["patterns"], tmp_path / "case", seed=0)
    start = run.processor_seconds()
    fuzzer.try_case(b"")
    assert run.processor_seconds() - start > 0.5 > fuzzer.report["longest"]


def test_a_run_that_gets_little_processor_time_ends_with_a_verdict_on_memory(
    tmp_path: Path,
) -> None:
    def wait(case: bytes) -> None:
        time.sleep(0.01)

    fuzzer = run.Fuzzer("patterns", wait, SURFACES["patterns"], tmp_path / "case", seed=0)
    fuzzer.fuzz(1e6, wall_seconds=0.5)
    assert fuzzer.report["memory"] and not fuzzer.report["findings"]


def test_the_input_of_a_process_that_dies_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "current = Path(sys.argv[sys.argv.index('--here') + 1])\n"
        "current.write_bytes(b'the case')\n"
        "current.with_suffix('.json').write_text('{\"resident\": 77, \"seconds\": 1}')\n"
        "os.write(2, b'memory allocation of 9 bytes failed')\n"
        "os.abort()\n"
    )
    monkeypatch.setattr(run, "__file__", str(script))
    monkeypatch.setattr(run, "FINDINGS", tmp_path / "findings")
    monkeypatch.setattr(run, "MAX_CRASHES", 2)
    findings = run.fuzz_in_process("patterns", 1.0, 0, is_native=False)
    (kept,) = (tmp_path / "findings" / "patterns").iterdir()
    assert kept.read_bytes() == b"the case" and len(findings) == 2
    for part in (kept.name, "exit -6", "77 MiB", "memory allocation of 9 bytes failed"):
        assert part in findings[0]


@pytest.mark.parametrize("name", SURFACES)
def test_changes_are_those_of_the_seed(name: str) -> None:
    surface = SURFACES[name]
    seeds = surface.seeds()
    runs = [
        [surface.mutate(random, random.choice(seeds), surface.tokens) for _ in range(30)]
        for random in (Random(3), Random(3))
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) > 15


@pytest.mark.slow
def test_all_folders_and_files_hold_models_that_run(tmp_path: Path) -> None:
    """Else all changes would be refused for the same reason."""
    for folder in write_folders(tmp_path).values():
        assert run_if_valid(folder), folder
    for name, content in gguf_files().items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        assert run_if_valid(path), name

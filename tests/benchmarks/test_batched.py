"""`bench batched` beside a program that prints what llama-batched-bench prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anydecode.benchmarks.batched import Setting, Speed, llama_speeds
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError

TABLE = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|     5 |      4 |    1 |      9 |    0.010 |   500.00 |    0.020 |   200.00 |    0.030 |   300.00 |
|     5 |      4 |    2 |     18 |    0.010 |  1000.00 |    0.020 |   400.00 |    0.030 |   600.00 |
"""
LINES = "\n".join(
    json.dumps({"pp": 5, "tg": 4, "pl": n, "speed_pp": 500.0 * n, "speed_tg": 200.0 * n})
    for n in (1, 2)
)
SETTING = Setting([5], [1, 2], 4, "float16", 1)

needs_a_shebang = pytest.mark.skipif(sys.platform == "win32", reason="the program is a script")


def program(folder: Path, printed: str, stream: str = "stdout") -> Path:
    """A program that prints this text on one of its streams; with flash attention off, with smaller
    speeds."""
    path = folder / "llama-batched-bench"
    slower = printed.replace("00.0", "0.0")
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen('llama.log', 'w').close()\n"
        f"print({slower!r} if 'off' in sys.argv else {printed!r}, file=sys.{stream})\n"
    )
    path.chmod(0o755)
    return path


@needs_a_shebang
@pytest.mark.parametrize(("printed", "stream"), [(LINES, "stdout"), (TABLE, "stderr")])
def test_lines_of_json_and_tables_are_read(tmp_path: Path, printed: str, stream: str) -> None:
    speeds = llama_speeds(program(tmp_path, printed, stream), "model.gguf", SETTING)
    assert speeds == {(5, 1): Speed(500.0, 200.0), (5, 2): Speed(1000.0, 400.0)}


@needs_a_shebang
def test_a_missing_row_is_an_error(tmp_path: Path) -> None:
    """It would count as a speed of zero."""
    bench = program(tmp_path, TABLE.rsplit("\n", 2)[0])
    with pytest.raises(InvalidRequestError, match="failed on model.gguf"):
        llama_speeds(bench, "model.gguf", SETTING)


@needs_a_shebang
def test_the_report_has_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "report.json"
    run_bench("shapes", ["--folder", str(tmp_path), "--shape", "tiny"])
    (model,) = tmp_path.glob("*.gguf")
    arguments = ["--bench", f"other={program(tmp_path, TABLE)}", "-m", str(model)]
    arguments += ["--prompt", "5", "--sequences", "1,2", "--tokens", "4", "--rounds", "1"]
    arguments += ["--file", str(model)]  # runs once
    run_bench("batched", [*arguments, "--threads", "1", "--json", str(report)])
    rows = json.loads(report.read_text())["speeds"]
    assert [(row["sequences"], row["decoding"]) for row in rows[2:]] == [(1, [200]), (2, [400])]
    assert all(speed > 0 for row in rows[:2] for speed in row["prefill"] + row["decoding"])
    assert not (tmp_path / "llama.log").exists()
    printed = capsys.readouterr()
    assert f"other, {model.name} " in printed.out
    assert f"1 of 2 measurements: other, {model.name}" in printed.err


@needs_a_shebang
def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    run_bench("shapes", ["--folder", str(tmp_path), "--shape", "tiny"])
    (model,) = tmp_path.glob("*.gguf")
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / model.name
    other.write_bytes(model.read_bytes())
    report = tmp_path / "report.json"
    arguments = ["--bench", f"other={program(tmp_path, TABLE)}", "-m", str(model), "--file"]
    arguments += [str(other), "--prompt", "5", "--sequences", "1,2", "--tokens", "4"]
    run_bench("batched", [*arguments, "--rounds", "1", "--threads", "1", "--json", str(report)])
    engines = {row["engine"] for row in json.loads(report.read_text())["speeds"]}
    assert engines == {f"anydecode, {model.name}", f"other, {model}", f"other, {other}"}

"""The footprint: sizes of packages, start-up by step, memory by load."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from anydecode.benchmarks import footprint
from anydecode.benchmarks.footprint_worker import STEPS
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError


def test_settings_are_pairs_of_sequences_and_prompt_tokens() -> None:
    assert footprint.parse_settings("1x64, 16x512") == [(1, 64), (16, 512)]
    for text in ("", "64", "0x8", "1x", "1x64;2x64", "1x64,,x"):
        with pytest.raises(InvalidRequestError, match="--settings .* must be pairs"):
            footprint.parse_settings(text)


def test_the_files_of_weights_are_all_parts_of_a_model(tmp_path: Path) -> None:
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf", "c.safetensors"]
    for name in [*names, "tokenizer.json"]:
        (tmp_path / name).write_bytes(b"#" * 100)
    parts = [tmp_path / name for name in names[:2]]
    assert footprint.weight_files(parts[1]) == parts
    assert footprint.weight_files(tmp_path / names[2]) == [tmp_path / names[2]]
    assert footprint.weight_files(tmp_path) == [tmp_path / names[3]]
    assert footprint.seconds_to_read(parts) > 0
    with pytest.raises(FileNotFoundError):
        footprint.seconds_to_read([tmp_path / "none"])


def package(folder: Path, name: str, size: int, *requires: str) -> None:
    """Install a package of one file of `size` bytes."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    info.joinpath("METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n"
    )
    (folder / f"{name}.py").write_bytes(b"#" * size)
    info.joinpath("RECORD").write_text(f"{name}.py,,\n")


def test_sizes_are_those_of_the_requirements_without_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "root_a", 10, "Left.B", 'right-c; extra == "all"')
    package(tmp_path, "left_b", 300, "root-a", 'other; python_version < "3"')
    package(tmp_path, "right_c", 5000)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert list(footprint.installed_sizes("root-a").items()) == [("left-b", 300), ("root-a", 10)]


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="2x8 cannot be measured: .*there is no file"):
        footprint.run_worker("/no/such/model", 1, 2, 8)


@pytest.mark.slow
def test_the_steps_and_the_memory_of_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(footprint, "installed_sizes", lambda: {"anydecode": 3 << 20, "small": 9})
    file = tmp_path / "report.json"
    run_bench(
        "footprint",
        ["--model", "tiny-autoregressive", "--settings", "1x8,4x40", "--rounds", "1",
         "--threads", "1", "--json", str(file)],
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert list(report["steps"]) == list(STEPS) and report["server_ready"] > 0
    assert all(step["seconds"] > 0 for step in report["steps"].values())
    reading = report["reading"]
    assert reading["bytes"] > 1 << 16 and reading["opening_seconds"] > reading["seconds"] > 0
    alone, together = report["memory"]
    # As many positions as tokens: 8 + 16 of one, 40 + 16 of four.
    assert together["cache"] * 24 == alone["cache"] * 4 * 56
    assert together["peak"] > together["cache"]
    shown = capsys.readouterr().out
    assert "1 others" in shown and "pack the weights" in shown and "keys and values" in shown
    assert "from the file to the first token" in shown

"""`anydecode bench diffusion-schemas`: valid answers, and what counts as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from anydecode.benchmarks.parallelbench import schemas
from anydecode.benchmarks.parallelbench.schemas import SCHEMAS, constrained_decoders, measure
from anydecode.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "diffusion-schemas", *arguments, "--threads", "1"])
    return int(ended.value.code or 0)


def test_decoders_that_take_constraints_are_chosen() -> None:
    keys = constrained_decoders()
    assert {"llada", "sdar", "diffusion-cfg", "duo"} <= set(keys)
    assert not {"s2d2", "apd", "ssd", "autoregressive"} & set(keys)


@pytest.mark.slow
def test_answers_of_own_schemas_are_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schemas.json"
    methods = ["--methods", "llada,diffusion-cfg,duo", "--models", "tiny-diffusion"]
    assert not run(*methods, "--json", str(file))
    report = json.loads(file.read_text())
    found = {(line["decoder"], line["model"]) for line in report["decoders"]}
    assert found == {
        ("llada", "tiny-diffusion"), ("diffusion-cfg", "tiny-diffusion"), ("duo", "tiny-uniform"),
    }  # fmt: skip
    for line in report["decoders"]:
        assert line["answers"] == line["valid"] == line["schemas"] == len(SCHEMAS), line
        assert not line["refused"] and not line["failed"] and line["tokens_per_pass"] > 0
    assert "30 of 30 answers are valid: canvas" in capsys.readouterr().out


@pytest.mark.slow
def test_invalid_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong twin: a constraint of another schema."""
    plain = schemas.JsonSchema

    def other(schema: Any, **options: Any) -> Any:
        return plain({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, **options)

    monkeypatch.setattr(schemas, "JsonSchema", other)
    with LLM("tiny-diffusion", threads=1) as llm:
        line = measure(llm, "llada", [("record", SCHEMAS["record"])], 2, 32, 1.0)
    assert (line["answers"], line["valid"], line["invalid"]) == (2, 0, 2)
    assert line["failed"]["record"].startswith("invalid: [")


@pytest.mark.slow
def test_schemas_of_jsonschemabench_are_read(tmp_path: Path) -> None:
    rows = [
        {"id": "one", "schema": {"type": "boolean"}, "tests": []},
        {"id": "two", "schema": {"type": "nothing"}, "tests": []},
    ]
    (tmp_path / "split.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "out.json"
    arguments = ["--data", str(tmp_path), "--models", "tiny-blocks", "--methods", "sdar"]
    assert not run(*arguments, "--json", str(file))
    [line] = json.loads(file.read_text())["decoders"]
    assert (line["schemas"], line["valid"], line["answers"]) == (1, 1, 1)
    assert list(line["refused"]) == ["two"]


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--methods", "s2d2") == 2
    assert "s2d2: no diffusion decoder that takes constraints" in capsys.readouterr().err
    assert run("--data", "/nowhere", "--methods", "llada") == 2
    assert "/nowhere is not a folder" in capsys.readouterr().err

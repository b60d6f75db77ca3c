"""`bench constrained`: which schemas are measured, and what ablations leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from anydecode.benchmarks.constrained_answers import (
    VARIANTS,
    OwnEngine,
    Setting,
    ablation_points,
    print_results,
    summary,
)
from anydecode.benchmarks.constrained_bench import load_rows, measure_splits
from anydecode.cli.bench import run_bench
from anydecode.constraints.json.shortest_completion import shortest_completion
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

TOKENIZER = ByteTokenizer()
#: No mask expresses the negation.
ODD = {"type": "integer", "not": {"multipleOf": 2}, "minimum": 0, "maximum": 99}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of two splits with seven and two schemas."""
    for split, count in (("first", 7), ("second", 2)):
        rows = [
            {"id": f"{split}-{number}", "schema": {"const": number}, "tests": []}
            for number in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_schemas_are_chosen_evenly_from_every_split(data: Path) -> None:
    def ids(**options: Any) -> list[str]:
        chosen = {"limit": None, "split": "", **options}
        return [name for _, name, _ in load_rows(data, **chosen)]

    assert ids(every=3) == ["first-0", "first-3", "first-6", "second-0"]
    assert ids(every=3, limit=2) == ["first-0", "first-3", "second-0"]
    assert ids(split="second") == ["second-0", "second-1"]
    tallies = measure_splits(load_rows(data, None, "", 3), TOKENIZER)
    assert {name: tally.compiled for name, tally in tallies.items()} == {"first": 3, "second": 1}


def test_without_guards_a_schema_allows_what_the_specification_allows() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    with LLM(ScriptedModel(seed=2), tokenizer=TOKENIZER, cache_positions=2048) as llm:
        guards = [
            OwnEngine(llm, Setting(tokens=30, guards=guards), "auto").ask(schema, range(1))[0][
                "guards"
            ]
            for guards in (True, False)
        ]
    limits = [(report["max_string"], report["extra_properties"]) for report in guards]
    assert limits == [(256, False), (None, True)]


def test_an_ablation_leaves_out_its_part_only() -> None:
    constraints = {name: VARIANTS[name](ODD) for name in VARIANTS if name != "xgrammar"}
    for constraint in constraints.values():
        constraint.start(TOKENIZER, TOKENIZER.vocab_size)
    whole = constraints.pop("anydecode")
    assert whole.narrowed(0) is not None and whole.completion_hints.values
    left_out = {
        name: (constraint.narrowed(0) is None, not constraint.completion_hints.values)
        for name, constraint in constraints.items()
    }
    assert left_out == {
        "without narrowing": (True, False),
        "without witnesses": (False, False),
        "without hints": (False, True),
    }


def test_without_witnesses_narrowed_schemas_do_not_name_what_negations_require() -> None:
    schema = {"type": "object", "not": {"propertyNames": {"not": {"pattern": "^[ab]7$"}}}}
    required = {}
    for name in ("anydecode", "without witnesses"):
        narrowed = VARIANTS[name](schema).narrowed(0)
        assert narrowed is not None
        required[name] = narrowed.schema.get("required")
    assert required == {"anydecode": ["a7"], "without witnesses": None}


def test_answers_of_the_scripted_model_are_validated(data: Path) -> None:
    file = data / "out.json"
    arguments = ["--data", str(data), "--every", "3", "--model", "scripted", "--json", str(file)]
    names = ["anydecode", "without narrowing"]
    run_bench("constrained", [*arguments, "--seeds", "2", "--engines", ",".join(names)])
    results = json.loads(file.read_text())["answers"]["figures"]
    assert {split: results[split]["anydecode"]["schemas"] for split in results} == {
        "first": 3,
        "second": 1,
        "all": 4,
    }
    assert [results["all"][name]["accepted"] for name in names] == [4, 4]
    assert results["all"]["anydecode"]["narrowed"] == 0


def test_without_hints_a_name_is_not_completed_by_the_schema() -> None:
    names = [f"{letter}_long_name" for letter in "abcdefgh"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "array", "minItems": 3} for name in names},
        "required": [names[-1]],
        "additionalProperties": False,
    }
    lengths = {}
    for variant in ("anydecode", "without hints"):
        constraint = VARIANTS[variant](schema)
        state = constraint.start(TOKENIZER, TOKENIZER.vocab_size)
        completion = shortest_completion(state, TOKENIZER, constraint.completion_hints)
        lengths[variant] = len(completion or range(10**6))
    assert lengths["anydecode"] < lengths["without hints"]


def test_points_are_of_accepted_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"fits": True, "finished": True, "tokens": 2, "total": 1.0, "first": 0.5, "compile": 1.0}
    results = {}
    for engine, accepted in (("anydecode", 4), ("without hints", 3), ("without narrowing", 5)):
        rows = [{**row, "id": str(number), "valid": number < accepted} for number in range(10)]
        results[engine] = summary(rows, Setting(seeds=1))
    assert ablation_points(results) == pytest.approx(
        {"without hints": -10, "without narrowing": 10}
    )
    assert ablation_points({"without hints": results["without hints"]}) == {}
    print_results({"all": results})
    assert "without hints: -10.0 points of accepted schemas" in capsys.readouterr().out


def test_an_unknown_engine_is_refused_with_the_names_of_all(data: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unknown engines x; .* without narrowing"):
        run_bench("constrained", ["--data", str(data), "--engines", "anydecode,x"])


def test_a_schema_may_hold_any_separator_of_lines_and_a_split_be_empty(tmp_path: Path) -> None:
    row = {"id": "a\u2028b"}
    (tmp_path / "one.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
    (tmp_path / "two.jsonl").write_text("", "utf-8")
    assert load_rows(tmp_path, None, "") == [("one", "a\u2028b", row)]

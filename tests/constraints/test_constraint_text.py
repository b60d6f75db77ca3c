"""The text that a JSON schema allows, and answers of the benchmark of constraints."""

from __future__ import annotations

import json

import pytest

from anydecode import JsonSchema
from anydecode.api.llm import LLM
from anydecode.benchmarks.constrained_answers import (
    OwnEngine,
    Setting,
    judged,
    run,
    summary,
)
from anydecode.benchmarks.constrained_bench import walk
from anydecode.benchmarks.spelling import spelling
from anydecode.constraints.json.canonical import canonical
from anydecode.constraints.json.relaxing import without_extra_properties
from anydecode.errors import (
    InvalidRequestError,
)
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.results_log import ResultsLog

TOKENIZER = ByteTokenizer()


def test_properties_keep_the_order_of_the_schema():
    text = {"type": "string"}
    tool = {"type": "object", "properties": {"id": text, "name": text}}
    schema = {"type": "object", "not": {"required": ["no"]},
              "properties": {"name": text, "tool": tool, "id": text}}  # fmt: skip
    rewritten = canonical(schema, 100)
    assert [n for n in rewritten["properties"] if n != "no"] == ["name", "tool", "id"]
    assert '"id": {"type": "string"}, "name"' in json.dumps(rewritten["properties"]["tool"])
    dependent = canonical({"dependentRequired": {"q": ["f", "b"]}}, 100)
    assert dependent["anyOf"][-1]["required"] == ["f", "b"]


def test_many_conditions_are_left_to_validation():
    parts = [
        {"if": {"properties": {"k": {"const": i}}}, "then": {"required": [f"p{i}"]}}
        for i in range(24)
    ]
    assert canonical({"type": "object", "allOf": parts}, 100) is None
    constraint = JsonSchema({"type": "object", "allOf": parts}, extra_properties=True)
    assert walk(constraint, TOKENIZER, '{"k": 3, "p3": 1}')
    assert not walk(constraint, TOKENIZER, '{"k": 3}')


def test_one_of_is_validated_if_it_is_masked_as_any_of():
    schema = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]}
    assert walk(JsonSchema(schema), TOKENIZER, "7") and not walk(JsonSchema(schema), TOKENIZER, "3")


def test_formats_can_be_annotations():
    schema = {"type": "string", "format": "ipv4"}
    assert not walk(JsonSchema(schema), TOKENIZER, '"x"')
    free = JsonSchema(schema, formats=False)
    assert walk(free, TOKENIZER, '"x"') and free.report().ignored == ("format ipv4 at #",)
    JsonSchema({"type": "string"}).start(TOKENIZER, 259)
    assert free.report().ignored


def test_extra_properties_are_forbidden_on_request_unless_the_schema_mentions_them():
    person = {"type": "object", "properties": {"name": {"type": "string"}}}
    held, free = JsonSchema(person, extra_properties=False), JsonSchema(person)
    assert not walk(held, TOKENIZER, '{"name": "a", "x": 1}')
    assert walk(free, TOKENIZER, '{"name": "a", "x": 1}')
    assert held.report().guards["extra_properties"] is False
    for schema in (
        {**person, "additionalProperties": True},
        {**person, "required": ["x"]},
        {**person, "minProperties": 2},
        {"allOf": [person, {"properties": {"x": {}}}]},
        {"$defs": {"p": person}, "allOf": [{"$ref": "#/$defs/p"}, {"required": ["x"]}]},
    ):
        assert without_extra_properties(schema) == schema
    deep = {"$defs": {"p": person}, "type": "array", "items": {"$ref": "#/$defs/p"}}
    assert without_extra_properties(deep)["$defs"]["p"]["additionalProperties"] is False


def test_a_value_is_found_in_another_spelling():
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "array"}}}
    state = JsonSchema(schema).start(TOKENIZER, 259)
    before = state.mask().copy()
    assert spelling(state, TOKENIZER, {"b": [1.0], "a": 1.0}) == '{"a": 1, "b": [1.0]}'
    assert spelling(state, TOKENIZER, {"a": 2}) is None
    assert (state.mask() == before).all()


def test_answers_are_validated_and_a_run_resumes(tmp_path):
    schema = {"type": "integer"}
    common = {"tokens": 3, "first": 0.1, "total": 0.3, "compile": 0.0, "fits": True}
    rows = [
        {**judged(schema, {"text": text, **common}), "id": name, "engine": "e"}
        for name, text in [("a", "1"), ("a", "2"), ("b", "1"), ("b", '"x"'), ("c", "1"), ("c", "[")]
    ]
    found = summary(rows, Setting(seeds=2))
    assert (found["schemas"], found["accepted"], found["valid"]) == (3, 1, 4)
    assert (found["finished_invalid"], found["unfinished"]) == (1, 1)
    file = tmp_path / "rows.jsonl"
    assert ResultsLog(file, {"seeds": 2}).entries == []
    with file.open("a") as out:
        out.write(json.dumps(rows[0]) + "\n" + '{"cut off')
    assert ResultsLog(file, {"seeds": 2}).entries == rows[:1]
    with pytest.raises(InvalidRequestError, match="other settings"):
        ResultsLog(file, {"seeds": 3})


def test_seeds_in_a_batch_equal_seeds_one_by_one():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with LLM(ScriptedModel(seed=2), tokenizer=TOKENIZER, cache_positions=2048) as llm:
        asked = OwnEngine(llm, Setting(tokens=40), "auto")
        alone = [asked.ask(schema, range(seed, seed + 1))[0] for seed in range(4)]
        together = asked.ask(schema, range(4))
        assert [row["text"] for row in together] == [row["text"] for row in alone]
        assert len({row["text"] for row in alone}) > 1  # control: seeds in another order differ
        refused = asked.ask({"enum": []}, range(4))
        assert len(refused) == 1 and "drawn" not in refused[0]


def test_a_failed_seed_does_not_affect_the_others():
    class Engine:
        def __init__(self, error):
            self.error = error

        def ask(self, schema, seeds):
            good = {"text": "1", "tokens": 1, "first": 0.1, "total": 0.1, "compile": 0.0}
            return [self.error if seed == 1 else dict(good) for seed in seeds]

    schemas = [("split", "name", {"type": "integer"})]
    with LLM(ScriptedModel(seed=2), tokenizer=TOKENIZER, cache_positions=64) as llm:
        for error, count in (({"error": "unlucky", "drawn": True}, 4), ({"error": "refused"}, 2)):
            engines = {"e": Engine(error)}
            (rows,) = run(engines, schemas, Setting(seeds=4), [], lambda row: None, llm)
            assert [row["seed"] for row in rows] == list(range(count))
            assert sum(row["valid"] for row in rows) == count - 1

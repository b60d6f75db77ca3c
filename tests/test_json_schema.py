"""JSON Schema whole: nothing invalid gets through, and what cannot be met is said."""

from __future__ import annotations

import json
import re
from time import monotonic

import jsonschema
import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.constraints import json_schema as module
from anydecode.constraints import shortest_completion as shortest_module
from anydecode.constraints.checking import IncrementalJsonValidator, Validator
from anydecode.constraints.completion_hints import Hints, example
from anydecode.constraints.forced_completion import ForcedCompletion
from anydecode.constraints.narrowing import narrowed
from anydecode.constraints.relaxing import LEVELS, nodes, relaxed, without_assertions
from anydecode.constraints.shortest_completion import shortest_completion
from anydecode.constraints.termination import cannot_terminate
from anydecode.errors import ConstraintError
from anydecode.evaluation.certify import _Restarts, scripted_llm
from anydecode.evaluation.constrained_bench import measure_schema, walk
from anydecode.models.scripted import ByteTokenizer

TOKENIZER = ByteTokenizer()

#: Schemas whose rules no mask expresses, with valid and invalid values.
UNMASKED = {
    "not": ({"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab"]),
    "oneOf": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [[1, 2], []], [[1, 1], [{}, {}]]),
    "contains": (
        {"type": "array", "contains": {"const": 5}, "maxContains": 2},
        [[5], [1, 5, 5]],
        [[], [1], [5, 5, 5]],
    ),
    "if": (
        {
            "if": {"properties": {"kind": {"const": 1}}, "required": ["kind"]},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        [{"kind": 1, "x": 0}, {"kind": 2, "y": 0}, 3],
        [{"kind": 1}, {"kind": 2, "x": 0}],
    ),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": 1, "a": 1}, {"b": "x"}],
        [{"b": "x", "a": 1}],
    ),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 2, "a": 1}], [{"a": 1}]),
    "propertyNames": ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "format": ({"type": "string", "format": "json-pointer"}, ["/a", ""], ["a"]),
    "pattern": ({"type": "string", "pattern": "^(?!foo)[a-z]+$"}, ["bar"], ["foot", "1"]),
    "patternProperties": (
        {"patternProperties": {"^(?!x)": {"type": "integer"}}, "additionalProperties": False},
        [{"a": 1}],
        [{"a": "1"}, {"x": 1}],
    ),
    "nested": (
        {"properties": {"list": {"items": {"type": "string", "not": {"const": "no"}}}}},
        [{"list": ["yes"]}, {"list": 3}],
        [{"list": ["yes", "no"]}],
    ),
    "draft4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        [4, 3.5],
        [3, 2],
    ),
    "remote order": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
        [[], [[], [[]]]],
        [1, [1]],
    ),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_nothing_invalid_is_allowed(name):
    schema, valid, invalid = UNMASKED[name]
    wrapped = {"type": "array", "items": schema, "maxItems": 3}
    for whole in (schema,) if {"$schema", "$defs"} & set(schema) else (schema, wrapped):
        wrap = (lambda v: v) if whole is schema else (lambda v: [v])
        tests = [{"valid": True, "data": wrap(value)} for value in valid]
        tests += [{"valid": False, "data": wrap(value)} for value in invalid]
        judge = jsonschema.validators.validator_for(whole, jsonschema.Draft202012Validator)(
            whole, format_checker=jsonschema.FormatChecker()
        )
        if name != "format":  # the judge knows json-pointer only with a further package
            assert [judge.is_valid(test["data"]) for test in tests] == [
                test["valid"] for test in tests
            ]
        tally = measure_schema(whole, tests, TOKENIZER, name)
        assert (tally.compiled, tally.wrongly_allowed, tally.wrongly_refused) == (1, 0, 0)


def test_a_loosened_schema_would_be_noticed(monkeypatch):
    """The twin: without its checks, the same schemas let invalid values through."""
    monkeypatch.setattr(JsonSchema, "incremental_validator", lambda self, tokenizer: None)
    through = 0
    for schema, _, invalid in UNMASKED.values():
        constraint = JsonSchema(schema)
        through += sum(walk(constraint, TOKENIZER, json.dumps(value)) for value in invalid)
    assert through > 3


@pytest.mark.parametrize("level", range(LEVELS))
def test_relaxed_schemas_allow_all_that_the_schema_allows(level):
    for schema, valid, _ in UNMASKED.values():
        weaker, dropped = relaxed(schema, level)
        judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        for value in valid:
            judge(weaker).validate(value)
        for entry in dropped:
            keyword, _, path = entry.partition(" at ")
            assert path.startswith("#") and keyword


def test_a_check_names_the_value_that_is_wrong():
    schema = {"items": {"properties": {"a": {"not": {"const": 3}}}}}
    watch = IncrementalJsonValidator(Validator(schema, 100), TOKENIZER)
    text = '[{"a": 4, "b": 3}, {"a": 3, '
    found = [watch.push(byte) for byte in text.encode()]
    assert found[:-2] == [None] * (len(text) - 2)
    assert found[-2] == text.rindex("3")


def test_patterns_lose_their_assertions_and_nothing_else():
    for pattern, looser in (
        ("^(?!foo)[a-z]+$", "^[a-z]+$"),
        (r"^(?=.*[)(\])])(a|b)(?<!b)x$", "^(a|b)x$"),
        (r"^[(?=]\(?=$", r"^[(?=]\(?=$"),
        (r"^(a+)-\1$", r"^(a+)-[\s\S]*$"),
    ):
        assert without_assertions(pattern) == looser, pattern
    assert without_assertions("(?=a") is None


def test_strings_with_escapes_and_keys_that_look_like_values():
    schema = {
        "properties": {'k"]}': {"not": {"const": 'v"'}}, "n": {"not": {"const": "k"}}},
        "additionalProperties": {"not": {"const": False}},
    }
    constraint = JsonSchema(schema)
    for value, fits in (
        ({'k"]}': "v"}, True),
        ({'k"]}': 'v"'}, False),
        ({"n": 'k"'}, True),
        ({"n": "k"}, False),
        ({"z": [False, {"n": "k"}]}, True),
        ({"z": False}, False),
    ):
        assert walk(constraint, TOKENIZER, json.dumps(value)) == fits, value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schema", [
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, 2, 5]}, "contains": {"const": 5}, "maxItems": 3},
    {"type": "object", "properties": {"k": {"type": "string", "format": "json-pointer",
     "maxLength": 6}, "n": {"type": "integer", "not": {"multipleOf": 2}, "minimum": 0,
     "maximum": 99}}, "required": ["k", "n"], "additionalProperties": False},
    {"type": "string", "pattern": "^(?![a-m])[a-z]{2,3}$", "maxLength": 3},
], ids=["unique", "contains", "object", "lookahead"])  # fmt: skip
def test_wrong_values_are_drawn_again(schema, temperature):
    """Finished answers are valid, and the same with speculation and with restarts."""
    options = {"constraint": JsonSchema(schema), "temperature": temperature, "max_tokens": 120}
    tries = 0
    for seed in range(2):
        texts = []
        for decoder, shaken in (("autoregressive", 0), ("jump-forward", 0), ("autoregressive", 1)):
            with scripted_llm() as llm:
                if shaken:
                    _Restarts(llm.engine, seed).__enter__()
                answer = llm.generate("x: ", decoder=decoder, seed=seed, logprobs=1, **options)
                llm.engine.check_integrity()
                texts.append(answer.tokens)
                assert len(answer.logprobs) == len(answer.tokens)
        assert texts[0] == texts[1] == texts[2]
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
            assert answer.constraint["complete"] and answer.constraint["checked"]
        tries += answer.constraint["tries"]
    assert tries or temperature or "contains" not in schema


def test_rejected_values_leave_the_distribution_of_valid_ones():
    """Enumerated: values that pass are distributed as the decoder's own, given that they are
    valid. Taking only the closing token away would not be."""
    schema = {"enum": [11, 12, 21, 22], "not": {"const": 11}}
    plain, found = {}, {}
    with scripted_llm() as llm:
        for seed in range(160):
            options = {"temperature": 1.0, "seed": seed, "max_tokens": 8}
            free = llm.generate("q", constraint=JsonSchema({"enum": schema["enum"]}), **options)
            plain[free.text.strip()] = plain.get(free.text.strip(), 0) + 1
            held = llm.generate("q", constraint=_unmasked(schema), **options)
            found[held.text.strip()] = found.get(held.text.strip(), 0) + 1
    assert "11" not in found and plain.get("11")
    total = sum(count for text, count in plain.items() if text != "11")
    for text in ("12", "21", "22"):
        expected = 160 * plain.get(text, 0) / total
        assert abs(found.get(text, 0) - expected) < 4 * np.sqrt(expected + 160 / total) + 6


def _unmasked(schema):
    """The schema with `not` left to the checks, whatever the mask could say."""
    constraint = JsonSchema(schema)
    constraint._candidates = lambda: iter([(*relaxed(schema), True)])
    module._PLANS.clear()
    return constraint


def test_tries_are_bounded():
    schema = {"type": "string", "pattern": "^(?!a)a", "maxLength": 4}
    with scripted_llm() as llm, pytest.raises(ConstraintError, match="no valid answer within 6"):
        llm.generate("x", constraint=JsonSchema(schema, tries=6), temperature=1.0, seed=1)


def test_long_answers_can_be_closed():
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"type": "integer"}},
                       "end": {"type": "boolean"}},
        "required": ["list", "end"],
    }  # fmt: skip
    for limit in (40, 60):
        with scripted_llm() as llm:
            options = {"max_tokens": limit, "temperature": 0.9, "seed": 4}
            open_end = llm.generate("x", constraint=JsonSchema(schema), **options)
            closed = llm.generate("x", constraint=JsonSchema(schema, close=True), **options)
        assert closed.finish_reason == "stop" and len(closed.tokens) <= limit
        jsonschema.validate(json.loads(closed.text), schema)
        if open_end.finish_reason == "length":
            assert not open_end.constraint["complete"]


#: Schemas of which a careless model never sees the end.
UNBOUNDED = {
    "list": {"type": "array", "items": {"type": "integer"}},
    "free": {"type": "object"},
    "named": {"type": "object", "additionalProperties": {"type": "object"}, "minProperties": 2},
    "recursive": {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
                       "end": {"type": "null"}},
        "required": ["end"],
    },
    "digits": {"type": "number"},
    "checked": {"type": "array", "minItems": 1, "items": {"type": "array", "uniqueItems": True}},
}  # fmt: skip


def babble(schema, limit=64, **options):
    """Eight answers of a model that never closes what it need not, of at most `limit` tokens."""
    with scripted_llm() as llm:
        constraint = JsonSchema(schema, finish=options.pop("finish", True))
        closing = dict.fromkeys([*b"]}", *TOKENIZER.eos_ids], -100.0)
        options = {"max_tokens": limit, "temperature": 1.5, "seed": 3, "n": 8,
                   "logit_bias": closing} | options  # fmt: skip
        return llm.generate("x", constraint=constraint, **options).samples


@pytest.mark.parametrize("name", UNBOUNDED)
def test_answers_finish_within_the_limit(name):
    schema = UNBOUNDED[name]
    answers = babble(schema)
    for answer in answers:
        assert answer.finish_reason == "stop" and len(answer.tokens) <= 64
        assert answer.constraint["complete"] and answer.constraint["guards"]["finish"] is True
        jsonschema.validate(json.loads(answer.text), schema)
    free = babble(schema, finish=False)
    assert not free[0].constraint["guards"]["finish"]
    if name != "checked":  # whose long answers are begun anew
        assert any(one.finish_reason == "length" for one in free)
        assert any(one.constraint["steered"] for one in answers)
        for one, other in zip(answers, free, strict=True):  # nothing is bent before it must be
            assert one.constraint["steered"] or one.tokens == other.tokens


def test_an_end_that_does_not_fit_is_not_forced():
    names = [f"a_name_that_is_long_{i}" for i in range(9)]
    schema = {"type": "object", "properties": dict.fromkeys(names, {}), "required": names}
    for answer in babble(schema, limit=32):
        assert answer.finish_reason == "length" and not answer.constraint["steered"]


def test_bans_outrank_the_way_to_the_end():
    for answer in babble({"type": "array"}, banned_words=["]"], limit=48):
        assert answer.finish_reason == "length"
    for answer in babble(UNBOUNDED["digits"], min_tokens=60):
        assert len(answer.tokens) >= 60


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_decoder_takes_the_same_way_to_the_end(temperature, monkeypatch):
    def said(decoder, **options):
        options = {"decoder": decoder, "temperature": temperature, "n": 1} | options
        return babble(UNBOUNDED["list"], **options)[0]

    expected = said("autoregressive")
    assert expected.constraint["steered"]
    for decoder in ("following:count=3", "prompt-lookup", "layer-draft", "jump-forward", "auto"):
        assert said(decoder).tokens == expected.tokens, decoder

    def forgetful(self):  # the twin: forks that lose count of what has been said
        return ForcedCompletion(
            self.inner.fork(), self._tokenizer, self._vocab_size, self._limit, self._hints
        )

    monkeypatch.setattr(ForcedCompletion, "fork", forgetful)
    assert said("following:count=3").tokens != expected.tokens


def test_steered_states_fork_and_roll_back():
    state = JsonSchema(UNBOUNDED["list"]).begin(TOKENIZER, 259, 32)
    text, said, masks = b"[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13", [], []
    while not state.finished:
        masks.append(state.mask())
        token = (state.forced() or [text[len(said)]])[0]
        assert state.allows(token) and bool(masks[-1][token])
        state.advance(token)
        said.append(token)
    assert state.steered and len(said) <= 32 and bytes(said).endswith(b"]")
    state.rollback(len(said))
    branch = state.fork()
    assert not state.steered and not branch.steered
    for token, mask in zip(said, masks, strict=True):
        assert np.array_equal(branch.mask(), mask)
        branch.advance(token)
    assert branch.steered and np.array_equal(state.mask(), masks[0])


def test_guards_are_on_and_can_be_taken_off():
    free = JsonSchema({"type": "string"}, max_string=0)
    held = JsonSchema({"type": "string"}, max_string=4)
    assert walk(free, TOKENIZER, json.dumps("x" * 300))
    assert walk(held, TOKENIZER, '"xxxx"') and not walk(held, TOKENIZER, '"xxxxx"')
    tight = JsonSchema({"type": "array"}, whitespace="")
    assert walk(tight, TOKENIZER, "[1,2]") and not walk(tight, TOKENIZER, "[1, 2]")
    assert not walk(JsonSchema({"type": "array"}), TOKENIZER, "[" + " " * 100 + "]")


def test_schemas_come_as_dict_text_or_model():
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int = pydantic.Field(ge=0)

    for schema in (Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())):
        constraint = JsonSchema(schema)
        assert walk(constraint, TOKENIZER, '{"name": "a", "age": 3}')
        assert not walk(constraint, TOKENIZER, '{"name": "a", "age": -3}')
        assert constraint.is_valid('{"name": "a", "age": 3}') and not constraint.is_valid("{")


def deep(depth: int):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("schema, words", [
    ({"type": "strange"}, "not valid"),
    ({"minLength": "3"}, "minLength"),
    ({"type": "string", "pattern": "("}, "not valid"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"$ref": "http://example.org/other.json"}, "example.org"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no"),
    (False, "no text"),
    ({"not": {}}, "no value"),
    ({"enum": []}, "no text|not valid"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no end"),
    ({"$ref": "#"}, "no end"),
    (deep(200), "deep"),
    ('{"type": ', "not valid JSON"),
    ("[" * 100_000, "not valid JSON|at most"),
    ([1], "object"),
    ({"x": {1, 2}}, "plain JSON"),
    ({"description": "x" * (3 << 20)}, "characters"),
])  # fmt: skip
def test_bad_schemas_are_refused_in_bounded_time(schema, words):
    began = monotonic()
    with pytest.raises(ConstraintError, match=re.compile(words, re.I)) as caught:
        JsonSchema(schema).start(TOKENIZER, 259)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert monotonic() - began < 20


def test_hostile_patterns_and_sizes_end():
    """A catastrophic pattern and a large schema: an error or a constraint, in bounded time."""
    began = monotonic()
    hostile = JsonSchema({"type": "string", "pattern": "^(?=x)(a+)+$", "maxLength": 64})
    assert not walk(hostile, TOKENIZER, json.dumps("a" * 40 + "!"))
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    assert walk(JsonSchema(large), TOKENIZER, '{"p7": "x"}')
    assert monotonic() - began < 30


def test_recursion_with_an_end_is_fine():
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
            "required": ["next"]}  # fmt: skip
    assert not cannot_terminate(tree) and not cannot_terminate(
        {"$ref": "#/$defs/a", "$defs": {"a": True}}
    )
    assert walk(JsonSchema(tree), TOKENIZER, '{"next": {"next": null}}')


def test_reports_name_keyword_and_path():
    schema = {"properties": {"a/b": {"type": "array", "uniqueItems": True, "format": "shiny"}}}
    constraint = JsonSchema(schema)
    constraint.start(TOKENIZER, 259)
    report = constraint.report().to_dict()
    assert "uniqueItems at #/properties/a~1b" in report["checked"][0]
    assert report["ignored"] == ["format shiny at #/properties/a~1b"]
    assert report["guards"]["max_string"] == 256 and "type" in report["masked"]


def test_narrowed_schemas_stay_within():
    schema = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for number in range(4):
        narrow = narrowed(schema, number, 80)
        assert not any("oneOf" in node for _, node in nodes(narrow))
        state = JsonSchema(narrow).start(TOKENIZER, 259)
        assert state.mask().any()


def test_schemas_are_compiled_once():
    module._PLANS.clear()
    schema = {"type": "array", "uniqueItems": True}
    first, second = JsonSchema(schema), JsonSchema(json.dumps(schema))
    first.start(TOKENIZER, 259)
    second.start(TOKENIZER, 259)
    assert first._plan is second._plan and len(module._PLANS) == 1


def test_endings_are_found_far_from_the_end():
    names = [f"name{i}" for i in range(9)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names},
              "required": names}  # fmt: skip
    state = JsonSchema(schema).start(TOKENIZER, 259)
    for byte in b'{"name0": "abc':
        state.advance(byte)
    ending = shortest_completion(state, TOKENIZER)
    text = b'{"name0": "abc' + bytes(ending[:-1])
    jsonschema.validate(json.loads(text), schema)
    assert set(json.loads(text)) == set(names)
    assert len(shortest_completion(JsonSchema({"enum": [1]}).start(TOKENIZER, 259), TOKENIZER)) == 2


@pytest.mark.parametrize("rule, said", [
    ({"format": "time"}, "10:00:00.0"),
    ({"format": "email"}, "ab"),
    ({"format": "duration"}, "P1"),
    ({"pattern": r"^\d+\.\d+\.\d+$"}, "12"),
    ({"pattern": "^[a-z0-9-]+/[a-z0-9]+$"}, "ab"),
    ({"minLength": 100}, "x"),
])  # fmt: skip
def test_endings_are_found_behind_stretches_without_an_end(rule, said, monkeypatch):
    """Digits and letters may go on for ever: what else may follow is looked for."""
    schema = {"type": "string", **rule}
    state = JsonSchema(schema).start(TOKENIZER, 259)
    for byte in f'"{said}'.encode():
        state.advance(byte)
    ending = shortest_completion(state, TOKENIZER)
    jsonschema.validate(json.loads(f'"{said}'.encode() + bytes(ending[:-1])), schema)
    assert len(ending) < 20 or "minLength" in rule
    monkeypatch.setattr(shortest_module, "_ways_out", lambda *_: [])
    assert shortest_completion(state, TOKENIZER) is None or rule.keys() & {"minLength"}


DOCUMENT = {
    "type": "object",
    "properties": {
        "extras": {"type": "object", "required": ["tags"], "properties": {"tags": {"minItems": 4,
                   "type": "array", "items": {"type": "string"}}}},
        "kind": {"enum": ["a_long_winded_name", "short"]},
        "stamp": {"type": "string", "pattern": "\\d{4}-\\d{2}"},
        "more": {"$ref": "#/properties/extras"},
        "size": {"type": "integer", "minimum": 512},
    },
    "required": ["kind", "stamp", "size"],
}  # fmt: skip


def test_hints_lead_to_the_shortest_end():
    """Only what is needed, the shortest of several values, and text for a pattern that may be
    anywhere in its string, which no mask leads to."""
    constraint = JsonSchema(DOCUMENT)
    state = constraint.start(TOKENIZER, 259)
    ending = shortest_completion(state, TOKENIZER, constraint.hints)
    assert bytes(ending[:-1]) == b'{"kind":"short","stamp":"0000-00","size":512}'
    assert shortest_completion(state, TOKENIZER) is None  # the twin: masks alone


class _Words(type(TOKENIZER)):
    """Bytes, and a few words that are one token."""

    words = (b'{"kind":"', b'","', b'":"')

    vocab_size = TOKENIZER.vocab_size + len(words)

    def token_bytes(self, token):
        last = TOKENIZER.vocab_size
        return self.words[token - last] if token >= last else super().token_bytes(token)


def test_ends_are_said_with_few_tokens(monkeypatch):
    words = _Words()
    constraint = JsonSchema(DOCUMENT)
    state = constraint.start(words, words.vocab_size)
    ending = shortest_completion(state, words, constraint.hints)
    text = b"".join(map(words.token_bytes, ending[:-1]))
    assert text == b'{"kind":"short","stamp":"0000-00","size":512}'
    assert len(ending) - 1 == len(text) - 8 - 2 * 2 - 2  # the first word, two and one of the others
    monkeypatch.setattr(
        shortest_module._Vocabulary, "fewest", lambda self, text: self.bytewise(text)
    )
    assert len(shortest_completion(state, words, constraint.hints)) > len(ending)


@pytest.mark.parametrize("pattern, text", [
    (r"\d{4}-\d{2}", "0000-00"),
    (r"^[^0]+\$$", "a$"),
    (r"[Hh]otel [Pp]aris.*", "Hotel Paris"),
    (r"^(?!x)a|bcd$", "a"),
    (r"^[$^]$", "$"),
    (r"\p{L}(", None),
])  # fmt: skip
def test_examples_match_their_pattern(pattern, text):
    assert example(pattern) == text


def test_names_are_taken_in_the_order_of_their_object():
    hints = Hints(DOCUMENT)
    assert hints.ordered({"extras", "kind"}) == ["kind", "extras"]
    assert hints.ordered({"stamp", "kind"}) == ["stamp", "kind"]  # the last one needed is next
    free = Hints({"properties": {"a": {"type": "array", "minItems": 3}, "b": {}, "c": DOCUMENT}})
    assert free.ordered({"a", "b", "c"}) == ["b", "a", "c"]


def test_an_end_that_takes_most_of_the_limit_is_begun_in_time(monkeypatch):
    names = [chr(97 + i) for i in range(16)]
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "string"}),
              "required": names}  # fmt: skip
    for answer in babble(schema, limit=120):  # of which 114 are needed
        assert answer.finish_reason == "stop"
    monkeypatch.setattr(
        ForcedCompletion, "of", ForcedCompletion
    )  # the twin: looked for after an eighth of the limit
    assert any(one.finish_reason == "length" for one in babble(schema, limit=120))

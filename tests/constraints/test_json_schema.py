"""JSON Schema constraints: no invalid value is allowed, and unsatisfiable schemas are rejected."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import jsonschema
import jsonschema_rs
import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.benchmarks.constrained_bench import measure_schema, walk
from anydecode.certification.checks import Restarts, scripted_llm
from anydecode.constraints.json import json_schema as json_schema_module
from anydecode.constraints.json.checking import IncrementalJsonValidator, Validator
from anydecode.constraints.json.completion_hints import SchemaHints, example
from anydecode.constraints.json.forced_completion import ForcedCompletion
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.relaxing import (
    NUM_LEVELS,
    relaxed_schema,
    subschemas,
    without_assertions,
)
from anydecode.constraints.json.shortest_completion import (
    MAX_WORK,
    search_completion,
    shortest_completion,
)
from anydecode.constraints.json.termination import cannot_terminate
from anydecode.constraints.languages import Regex
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer
from anydecode.sampling.sampler import Sampler
from steps import num_steps

TOKENIZER = ByteTokenizer()

#: Schemas with rules that a mask cannot express, with valid and invalid values.
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
def test_exactly_the_valid_values_are_allowed(name):
    schema, valid, invalid = UNMASKED[name]
    wrapped = {"type": "array", "items": schema, "maxItems": 3}
    for whole in (schema,) if {"$schema", "$defs"} & set(schema) else (schema, wrapped):
        wrap = (lambda v: v) if whole is schema else (lambda v: [v])
        tests = [{"valid": True, "data": wrap(value)} for value in valid]
        tests += [{"valid": False, "data": wrap(value)} for value in invalid]
        reference = jsonschema.validators.validator_for(whole, jsonschema.Draft202012Validator)(
            whole, format_checker=jsonschema.FormatChecker()
        )
        if name != "format":  # the reference supports json-pointer only with another package
            assert [reference.is_valid(test["data"]) for test in tests] == [
                test["valid"] for test in tests
            ]
        tally = measure_schema(whole, tests, TOKENIZER, name)
        assert (tally.compiled, tally.wrongly_allowed, tally.wrongly_refused) == (1, 0, 0)


def test_invalid_values_are_allowed_without_validation(monkeypatch):
    """Control: without validation, the same schemas allow invalid values."""
    monkeypatch.setattr(JsonSchema, "incremental_validator", lambda self, tokenizer: None)
    num_allowed = 0
    for schema, _, invalid in UNMASKED.values():
        constraint = JsonSchema(schema)
        num_allowed += sum(walk(constraint, TOKENIZER, json.dumps(value)) for value in invalid)
    assert num_allowed > 3


@pytest.mark.parametrize("level", range(NUM_LEVELS))
def test_relaxed_schemas_allow_everything_the_schema_allows(level):
    for schema, valid, _ in UNMASKED.values():
        weaker, dropped = relaxed_schema(schema, level)
        reference = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        for value in valid:
            reference(weaker).validate(value)
        for entry in dropped:
            keyword, _, path = entry.partition(" at ")
            assert path.startswith("#") and keyword


def test_the_validator_returns_the_start_of_the_invalid_value():
    schema = {"items": {"properties": {"a": {"not": {"const": 3}}}}}
    validator = IncrementalJsonValidator(Validator(schema, 100), TOKENIZER)
    text = '[{"a": 4, "b": 3}, {"a": 3, '
    found = [validator.push(byte) for byte in text.encode()]
    assert found[:-2] == [None] * (len(text) - 2)
    assert found[-2] == text.rindex("3")


def test_only_assertions_are_removed_from_patterns():
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schema", [
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, 2, 5]}, "contains": {"const": 5}, "maxItems": 3},
    {"type": "object", "properties": {"k": {"type": "string", "format": "json-pointer",
     "maxLength": 6}, "n": {"type": "integer", "not": {"multipleOf": 2}, "minimum": 0,
     "maximum": 99}}, "required": ["k", "n"], "additionalProperties": False},
    {"type": "string", "pattern": "^(?![a-m])[a-z]{2,3}$", "maxLength": 3},
], ids=["unique", "contains", "object", "lookahead"])  # fmt: skip
def test_invalid_values_are_sampled_again(schema, temperature):
    """Finished answers are valid, and the same with speculation and after restarts."""
    options = {"constraint": JsonSchema(schema), "temperature": temperature, "max_tokens": 120}
    tries = 0
    for seed in range(2):
        texts = []
        for decoder, restarts in (
            ("autoregressive", 0),
            ("jump-forward", 0),
            ("autoregressive", 1),
        ):
            with scripted_llm() as llm:
                if restarts:
                    Restarts(llm.engine, seed).__enter__()
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


def test_rejection_preserves_the_distribution_of_valid_values():
    """By enumeration: accepted values follow the decoder's distribution given that they are valid.
    Removing only the last token of an invalid value would bias it."""
    free_schema = {
        "type": "array", "minItems": 2, "items": False,
        "prefixItems": [{"enum": [1, 2]}, {"enum": [1, 2, 3]}],
    }  # fmt: skip
    schema = {**free_schema, "uniqueItems": True}
    plain, found, tries = {}, {}, 0
    with scripted_llm() as llm:
        for seed in range(160):
            options = {"temperature": 1.0, "seed": seed, "max_tokens": 8}
            free = llm.generate("q", constraint=JsonSchema(free_schema, whitespace=""), **options)
            plain[free.text.strip()] = plain.get(free.text.strip(), 0) + 1
            guarded = llm.generate("q", constraint=JsonSchema(schema, whitespace=""), **options)
            tries += guarded.constraint["tries"]
            found[guarded.text.strip()] = found.get(guarded.text.strip(), 0) + 1
    valid = ("[1,2]", "[1,3]", "[2,1]", "[2,3]")
    assert set(found) <= set(valid) and tries > 9  # left to validation
    total = sum(plain.get(text, 0) for text in valid)
    for text in valid:
        expected = 160 * plain.get(text, 0) / total
        assert abs(found.get(text, 0) - expected) < 4 * np.sqrt(expected + 160 / total) + 6


def test_a_multiple_with_too_many_remainders_is_left_to_validation():
    """A mask takes a time that grows with their number: minutes for ten million."""
    with scripted_llm() as llm:
        for step, is_left in ((10_000, False), (9_999_991, True), (1.25e30, True), (0.0001, False)):
            constraint = JsonSchema({"type": "number", "multipleOf": step}, tries=2)
            try:
                text = llm.generate("q", constraint=constraint, max_tokens=12, seed=1).text
                assert Decimal(text) % Decimal(str(step)) == 0
            except ConstraintError as error:
                assert is_left and "no valid answer within 2" in str(error)
            assert constraint.left_out == (["multipleOf at #"] if is_left else [])


def test_the_number_of_tries_is_limited():
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


#: Schemas with unbounded values, which a model that avoids closing tokens never completes.
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


def answers_of_careless_model(schema, limit=64, **options):
    """Eight answers, or `n`, of at most `limit` tokens, of a model that avoids closing tokens."""
    with scripted_llm() as llm:
        constraint = JsonSchema(schema, finish=options.pop("finish", True))
        closing = dict.fromkeys([*b"]}", *TOKENIZER.eos_ids], -100.0)
        options = {"max_tokens": limit, "temperature": 1.5, "seed": 3, "n": 8,
                   "logit_bias": closing} | options  # fmt: skip
        return llm.generate("x", constraint=constraint, **options).samples


@pytest.mark.parametrize("name", UNBOUNDED)
def test_forced_completion_finishes_answers_within_the_limit(name):
    schema = UNBOUNDED[name]
    answers = answers_of_careless_model(schema)
    for answer in answers:
        assert answer.finish_reason == "stop" and len(answer.tokens) <= 64
        assert answer.constraint["complete"] and answer.constraint["guards"]["finish"] is True
        jsonschema.validate(json.loads(answer.text), schema)
    free = answers_of_careless_model(schema, finish=False)
    assert not free[0].constraint["guards"]["finish"]
    if name != "checked":  # its long answers are generated again
        assert any(one.finish_reason == "length" for one in free)
        assert any(one.constraint["steered"] for one in answers)
        for one, other in zip(answers, free, strict=True):  # free until a completion is forced
            assert one.constraint["steered"] or one.tokens == other.tokens


def test_a_completion_that_does_not_fit_is_not_forced():
    names = [f"a_name_that_is_long_{i}" for i in range(9)]
    schema = {"type": "object", "properties": dict.fromkeys(names, {}), "required": names}
    for answer in answers_of_careless_model(schema, limit=32):
        assert answer.finish_reason == "length" and not answer.constraint["steered"]


def test_bans_take_precedence_over_forced_completion():
    for answer in answers_of_careless_model({"type": "array"}, banned_words=["]"], limit=48):
        assert answer.finish_reason == "length"
    for answer in answers_of_careless_model(UNBOUNDED["digits"], min_tokens=60):
        assert len(answer.tokens) >= 60


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forced_completion_is_the_same_under_every_decoder(temperature, monkeypatch):
    def generate(decoder, **options):
        options = {"decoder": decoder, "temperature": temperature, "n": 1} | options
        return answers_of_careless_model(UNBOUNDED["list"], **options)[0]

    expected = generate("autoregressive")
    assert expected.constraint["steered"]
    for decoder in ("multi-step:count=3", "prompt-lookup", "layerskip", "jump-forward", "auto"):
        assert generate(decoder).tokens == expected.tokens, decoder

    def fork_without_count(self):  # control: forks lose the token count
        return ForcedCompletion(
            self.inner.fork(), self._tokenizer, self._vocab_size, self._max_tokens, self._hints
        )

    monkeypatch.setattr(ForcedCompletion, "fork", fork_without_count)
    assert generate("multi-step:count=3").tokens != expected.tokens


def test_forced_completion_states_fork_and_roll_back():
    state = JsonSchema(UNBOUNDED["list"]).start_with_limit(TOKENIZER, 259, 32)
    text, tokens, masks = b"[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13", [], []
    while not state.finished:
        masks.append(state.mask())
        token = int(masks[-1].argmax()) if state.is_completing else text[len(tokens)]
        assert state.allows(token) and bool(masks[-1][token])
        state.advance(token)
        tokens.append(token)
    assert state.is_forced and len(tokens) <= 32 and bytes(tokens).endswith(b"]")
    state.rollback(len(tokens))
    branch = state.fork()
    assert not state.is_forced and not branch.is_forced
    for token, mask in zip(tokens, masks, strict=True):
        assert np.array_equal(branch.mask(), mask)
        branch.advance(token)
    assert branch.is_forced and np.array_equal(state.mask(), masks[0])


#: Schemas whose answers of the scripted model end by themselves after some dozen tokens.
ENDING = {
    "list": {"type": "array", "items": {"type": "integer", "maximum": 99999}, "maxItems": 9},
    "strings": {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 9} for name in ("a", "b")},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "choices": {"type": "array", "items": {"enum": ["x", "yy", "zzz", [1, 2]]}, "maxItems": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDING)
def test_an_answer_that_fits_is_never_shortened(name, monkeypatch):
    def generate(limit, seed, **options):
        options = {"temperature": 1.0, "max_tokens": limit, "seed": seed} | options
        constraint = JsonSchema(ENDING[name], whitespace="")
        return llm.generate("x", constraint=constraint, **options)

    with scripted_llm() as llm:
        for seed in range(6):
            options = {"temperature": 0.0} if seed == 5 else {"top_p": 0.95} if seed == 4 else {}
            free = generate(300, seed, **options)
            count = len(free.tokens)
            assert free.finish_reason == "stop" and count > 3
            for limit in (count, count + 1, count + 9):
                for decoder in ("autoregressive", "prompt-lookup"):
                    fitting = generate(limit, seed, decoder=decoder, **options)
                    assert fitting.tokens == free.tokens, (seed, limit - count, decoder)
            for limit in (count - 1, count * 3 // 4):
                shorter = generate(limit, seed, **options)
                assert shorter.tokens != free.tokens and len(shorter.tokens) <= limit
                if shorter.finish_reason == "stop":
                    jsonschema.validate(json.loads(shorter.text), ENDING[name])

        # A sampler that takes the mask of the completion for that of the text shortens answers.
        monkeypatch.setattr(Sampler, "_sample_fitting", lambda *arguments: None)
        texts = [generate(300, seed) for seed in range(4)]
        assert any(
            generate(len(text.tokens), seed).tokens != text.tokens
            for seed, text in enumerate(texts)
        )


def test_a_token_that_does_not_fit_is_not_sampled(monkeypatch):
    def valid(limit):
        answers = answers_of_careless_model(UNBOUNDED["recursive"], limit)
        return [answer.finish_reason == "stop" for answer in answers]

    assert all(valid(48))
    monkeypatch.setattr(ForcedCompletion, "fits", lambda *arguments: True)
    assert not all(valid(48))


def test_the_probability_of_a_token_beside_the_completion_is_that_of_the_free_text():
    options = {"temperature": 1.0, "seed": 1, "logprobs": 1, "processed_logprobs": True}
    with scripted_llm() as llm:
        constraint = JsonSchema(ENDING["strings"], whitespace="")
        free = llm.generate("x", constraint=constraint, max_tokens=300, **options)
        count = len(free.tokens)
        fitting = llm.generate("x", constraint=constraint, max_tokens=count + 2, **options)
    assert fitting.tokens == free.tokens
    assert all(np.isfinite(one.logprob) for one in fitting.logprobs)


def test_strings_are_limited_and_white_space_is_set_on_request():
    free = JsonSchema({"type": "string"})
    guarded = JsonSchema({"type": "string"}, max_string=4)
    assert walk(free, TOKENIZER, json.dumps("x" * 300))
    assert walk(guarded, TOKENIZER, '"xxxx"') and not walk(guarded, TOKENIZER, '"xxxxx"')
    tight = JsonSchema({"type": "array"}, whitespace="")
    assert walk(tight, TOKENIZER, "[1,2]") and not walk(tight, TOKENIZER, "[1, 2]")
    assert not walk(JsonSchema({"type": "array"}), TOKENIZER, "[" + " " * 100 + "]")


def test_schemas_are_accepted_as_dict_text_or_model():
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int = pydantic.Field(ge=0)

    for schema in (Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())):
        constraint = JsonSchema(schema)
        assert walk(constraint, TOKENIZER, '{"name": "a", "age": 3}')
        assert not walk(constraint, TOKENIZER, '{"name": "a", "age": -3}')
        assert constraint.is_valid('{"name": "a", "age": 3}') and not constraint.is_valid("{")


def nested_array(depth: int):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("schema, words", [
    ({"type": "strange"}, "not valid: type is 'strange', and must be one of array"),
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
    (nested_array(200), "deep"),
    ('{"type": ', "not valid JSON"),
    ("[" * 100_000, "not valid JSON|at most"),
    ([1], "object"),
    ({"x": {1, 2}}, "plain JSON"),
    ({"const": float("inf")}, "plain JSON"),
    ({"description": "x" * (3 << 20)}, "characters"),
])  # fmt: skip
def test_invalid_schemas_are_rejected_in_bounded_work(schema, words):
    with pytest.raises(ConstraintError, match=re.compile(words, re.I)) as caught:
        num_steps(lambda: JsonSchema(schema).start(TOKENIZER, 259), max_steps=100_000)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("pattern", ["^(?=x)(a+)+$", "^(?!x)(a+)+$", "^(a+)+$"])
def test_the_work_of_a_hostile_pattern_is_in_proportion_to_the_text(pattern):
    hostile = JsonSchema({"type": "string", "pattern": pattern, "maxLength": 64})
    assert walk(hostile, TOKENIZER, '"a"') == ("?=x" not in pattern)
    assert not walk(hostile, TOKENIZER, json.dumps("a" * 40 + "!"))
    half, whole = (
        num_steps(lambda text=json.dumps("a" * size): walk(hostile, TOKENIZER, text), 100_000)
        for size in (30, 60)
    )
    assert whole <= 2 * half


def large_schema(num_properties: int):
    names = (f"p{i}" for i in range(num_properties))
    return JsonSchema({"type": "object", "properties": dict.fromkeys(names, {"type": "string"})})


def test_the_work_of_a_schema_is_in_proportion_to_its_properties():
    assert walk(large_schema(100), TOKENIZER, '{"p7": "x"}')
    half, whole = (
        num_steps(lambda size=size: walk(large_schema(size), TOKENIZER, '{"p7": "x"}'), 1_000_000)
        for size in (200, 400)
    )
    assert whole <= 2 * half


@pytest.mark.slow
def test_a_schema_of_many_properties_takes_bounded_work():
    def accept() -> None:
        assert walk(large_schema(20_000), TOKENIZER, '{"p7": "x"}')

    num_steps(accept, max_steps=20_000_000)


def test_recursive_schemas_with_finite_values_are_accepted():
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
            "required": ["next"]}  # fmt: skip
    assert not cannot_terminate(tree) and not cannot_terminate(
        {"$ref": "#/$defs/a", "$defs": {"a": True}}
    )
    assert walk(JsonSchema(tree), TOKENIZER, '{"next": {"next": null}}')


def test_reports_contain_keyword_and_path():
    schema = {"properties": {"a/b": {"type": "array", "uniqueItems": True, "format": "shiny"}}}
    constraint = JsonSchema(schema)
    constraint.start(TOKENIZER, 259)
    report = constraint.report().to_dict()
    assert "uniqueItems at #/properties/a~1b" in report["checked"][0]
    assert report["ignored"] == ["format shiny at #/properties/a~1b"]
    assert "type" in report["masked"]
    assert report["guards"]["max_string"] is None and report["guards"]["extra_properties"]


def test_narrowed_schemas_have_no_alternatives_and_can_start():
    schema = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for number in range(4):
        narrow = narrowed_schema(schema, number, 80)
        assert not any("oneOf" in node for _, node in subschemas(narrow))
        state = JsonSchema(narrow).start(TOKENIZER, 259)
        assert state.mask().any()


def test_schemas_are_compiled_once(monkeypatch):
    compiled, validator = [], json_schema_module.Validator
    monkeypatch.setattr(
        json_schema_module, "Validator", lambda *given: compiled.append(1) or validator(*given)
    )
    schema = {"type": "array", "uniqueItems": True, "title": "of this test alone"}
    first, second = JsonSchema(schema), JsonSchema(json.dumps(schema))
    first.start(TOKENIZER, 259)
    second.start(TOKENIZER, 259)
    assert len(compiled) == 1


def test_the_shortest_completion_is_found_far_from_the_end():
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


@pytest.mark.parametrize("rule, prefix", [
    ({"format": "time"}, "10:00:00.0"),
    ({"format": "email"}, "ab"),
    ({"format": "duration"}, "P1"),
    ({"pattern": r"^\d+\.\d+\.\d+$"}, "12"),
    ({"pattern": "^[a-z0-9-]+/[a-z0-9]+$"}, "ab"),
    ({"minLength": 100}, "x"),
])  # fmt: skip
def test_the_shortest_completion_is_found_after_unbounded_repetitions(rule, prefix):
    """Digits and letters can repeat without bound: the search tries other characters."""
    schema = {"type": "string", **rule}
    state = JsonSchema(schema).start(TOKENIZER, 259)
    for byte in f'"{prefix}'.encode():
        state.advance(byte)
    ending = shortest_completion(state, TOKENIZER)
    jsonschema.validate(json.loads(f'"{prefix}'.encode() + bytes(ending[:-1])), schema)
    assert len(ending) < 20 or "minLength" in rule


@pytest.mark.parametrize("opening, inner, closing", [('{"": ', "0", "}"), ("[", "", "]")])
def test_the_shortest_completion_closes_deeply_nested_values(opening, inner, closing):
    """Each closing bracket leaves the mask as it was, as digits do, but comes nearer to the end."""
    constraint = JsonSchema({"type": "object", "required": ["ab", "cd"]})
    state = constraint.start(TOKENIZER, 259)
    prefix = '{"ab": ' + 40 * opening
    for byte in prefix.encode():
        state.advance(byte)
    ending = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    assert bytes(ending[:-1]).decode() == inner + 40 * closing + ',"cd":0}'


@pytest.mark.parametrize("pattern", ["stable|beta", "^x.*stable$"])
def test_the_shortest_completion_is_found_in_a_name_without_its_end(pattern):
    """The name may not end yet, and no single character brings it nearer to its end."""
    schema = {"type": "object", "patternProperties": {pattern: {"type": "integer"}},
              "additionalProperties": False}  # fmt: skip
    constraint = JsonSchema(schema)
    state = constraint.start(TOKENIZER, 259)
    for byte in b'{"x_1_1_1':
        state.advance(byte)
    ending = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    jsonschema.validate(json.loads(b'{"x_1_1_1' + bytes(ending[:-1])), schema)
    assert len(ending) < 20


def test_the_work_of_a_search_counts_only_characters_that_the_mask_allows():
    """Behind a closing bracket they are few, so that many levels can be closed."""
    constraint = JsonSchema({"type": "object", "required": ["ab", "cd"]})
    state = constraint.start(TOKENIZER, 259)
    for byte in ('{"ab": ' + 40 * '{"": ' + "0").encode():
        state.advance(byte)
    found, work = search_completion(state, TOKENIZER, constraint.completion_hints, MAX_WORK)
    assert found is not None
    assert work < 60_000


def test_the_shortest_completion_is_found_after_unbounded_brackets():
    """Brackets that do not nest, and can repeat without bound."""
    state = Regex(r"\{\}+x").start(TOKENIZER, 259)
    state.advance(ord("{"))
    ending = shortest_completion(state, TOKENIZER)
    assert ending is not None and set(ending[:-2]) == {ord("}")} and ending[-2] == ord("x")


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


def test_hints_lead_to_the_shortest_completion():
    """Required names only, the shortest of several values, and a text for an unanchored pattern,
    which masks alone do not lead to."""
    constraint = JsonSchema(DOCUMENT)
    state = constraint.start(TOKENIZER, 259)
    ending = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    assert bytes(ending[:-1]) == b'{"kind":"short","stamp":"0000-00","size":512}'
    assert shortest_completion(state, TOKENIZER) is None  # control: masks alone


def test_hints_lead_through_several_formats():
    formats = ("date", "date-time", "duration", "email", "ipv4", "ipv6", "time", "uuid")
    properties = {name: {"type": "string", "format": name} for name in formats}
    schema = {"type": "object", "properties": properties, "required": list(formats)}
    constraint = JsonSchema(schema, max_string=0, extra_properties=True)
    state = constraint.start(TOKENIZER, 259)
    ending = shortest_completion(state, TOKENIZER, constraint.completion_hints)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    assert validator.is_valid(json.loads(bytes(ending[:-1])))
    assert shortest_completion(state, TOKENIZER) is None  # control: masks alone


class _TokenizerWithWords(type(TOKENIZER)):
    """Bytes, and a few words of one token each."""

    words = (b'{"kind":"', b'","', b'":"')

    vocab_size = TOKENIZER.vocab_size + len(words)

    def token_bytes(self, token):
        last = TOKENIZER.vocab_size
        return self.words[token - last] if token >= last else super().token_bytes(token)


def test_completions_use_few_tokens():
    words = _TokenizerWithWords()
    constraint = JsonSchema(DOCUMENT)
    state = constraint.start(words, words.vocab_size)
    ending = shortest_completion(state, words, constraint.completion_hints)
    text = b"".join(map(words.token_bytes, ending[:-1]))
    assert text == b'{"kind":"short","stamp":"0000-00","size":512}'
    assert len(ending) - 1 == len(text) - 8 - 2 * 2 - 2  # the first word, two and one of the others


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


def test_hinted_names_follow_the_order_of_their_object():
    hints = SchemaHints(DOCUMENT)
    assert hints.ordered({"extras", "kind"}) == ["kind", "extras"]
    assert hints.ordered({"stamp", "kind"}) == ["stamp", "kind"]  # the last required name is next
    free = SchemaHints(
        {"properties": {"a": {"type": "array", "minItems": 3}, "b": {}, "c": DOCUMENT}}
    )
    assert free.ordered({"a", "b", "c"}) == ["b", "a", "c"]


def test_a_completion_that_takes_most_of_the_limit_starts_in_time(monkeypatch):
    names = [chr(97 + i) for i in range(16)]
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "string"}),
              "required": names}  # fmt: skip
    options = {"limit": 120, "n": 3}  # 114 tokens are needed
    for answer in answers_of_careless_model(schema, **options):
        assert answer.finish_reason == "stop"
    monkeypatch.setattr(
        ForcedCompletion, "of", ForcedCompletion
    )  # control: the first search is after an eighth of the limit
    answers = answers_of_careless_model(schema, **options)
    assert any(one.finish_reason == "length" for one in answers)


def test_a_name_that_is_written_twice_is_one_property() -> None:
    """The mask counts it twice: alone, it is the wrong twin. One property more than the required
    ones needs no validator."""
    tokenizer = ByteTokenizer()
    schema = {"type": "object", "additionalProperties": {"enum": [1]}, "minProperties": 2}
    constraint = JsonSchema(schema)
    twice, state = '{"a":1,"a":1}', constraint.start(tokenizer, tokenizer.vocab_size)
    for token in tokenizer.encode(twice, special=False):
        assert state.allows(token)
        state.advance(token)
    assert state.can_stop
    assert walk(constraint, tokenizer, '{"a":1,"b":1}')
    assert not walk(constraint, tokenizer, twice)
    other = JsonSchema({"type": "object", "required": ["a"], "minProperties": 2})
    assert not walk(other, tokenizer, twice) and not other.needs_validation

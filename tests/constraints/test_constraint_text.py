"""Prompts that end inside a token, infilling, monitors, and constraints applied to drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from anydecode import JsonSchema, Regex
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
from anydecode.certification.oracles.constrained.markov_chain import CHAIN, chain_llm, share_of_a
from anydecode.certification.oracles.constrained.self_infill import filling_llm
from anydecode.certification.oracles.constraints.monitors import unknown_names
from anydecode.constraints.json.canonical import canonical
from anydecode.constraints.json.relaxing import without_extra_properties
from anydecode.constraints.monitors import Monitor
from anydecode.decoders.constrained.self_infill import SelfInfill
from anydecode.decoders.constrained.token_healing import TokenHealing
from anydecode.decoders.constrained.unbiased_tokenization import UnbiasedTokenization
from anydecode.errors import (
    InvalidRequestError,
    MissingPackageError,
    UnsupportedCombinationError,
)
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.results_log import ResultsLog

TOKENIZER = ByteTokenizer()


def test_the_next_letter_has_the_distribution_of_the_chain():
    for prompt in ("BA", "BAAA"):
        decoder = UnbiasedTokenization()
        with chain_llm() as llm:
            llm.generate(prompt, decoder=decoder, max_tokens=1)
        assert decoder.last_bytes[ord("A")] == pytest.approx(CHAIN["A"], abs=1e-6)
    assert share_of_a(None, 20) == 0
    assert abs(share_of_a(UnbiasedTokenization(), 200) - CHAIN["A"]) < 0.1


def test_covers_that_the_tokenizer_cannot_produce_change_the_distribution(monkeypatch):
    """Control: with every split of the text as a cover, the distribution is wrong."""
    from anydecode.decoders.constrained import unbiased_tokenization as module

    monkeypatch.setattr(module, "is_written", lambda *_: True)
    decoder = UnbiasedTokenization()
    with chain_llm() as llm:
        llm.generate("BAA", decoder=decoder, max_tokens=1)
        honest = decoder.last_bytes[ord("A")]
        row = np.log(np.array([0.3, 0.3, 0.4, 1e-30]))
        llm.model.script = lambda seen: row
        llm.clear()
        llm.generate("BAA", decoder=decoder, max_tokens=1)
    assert abs(decoder.last_bytes[ord("A")] - honest) > 0.05


def test_an_answer_is_the_text_after_the_prompt():
    with chain_llm() as llm:
        for decoder in ("unbiased-tokenization", "token-healing", "token-healing:count=2"):
            options = {"decoder": decoder, "temperature": 1.0, "logprobs": 1, "max_tokens": 6}
            answer = llm.generate("BAAB", seed=3, **options)
            assert len(answer.logprobs) == len(answer.tokens) == 6
            assert set(answer.text) <= {"A", "B"}


@pytest.mark.parametrize("decoder", ["unbiased-tokenization", "token-healing"])
def test_prompt_boundary_decoders_reject_unsupported_options(decoder):
    with chain_llm() as llm, pytest.raises(UnsupportedCombinationError, match="constraint"):
        llm.generate("BA", decoder=decoder, constraint=Regex("[AB]+"))
    with pytest.raises(InvalidRequestError):
        TokenHealing(0)
    with pytest.raises(InvalidRequestError):
        UnbiasedTokenization(0)


def test_self_infill_emits_left_middle_suffix_and_rejects_bad_options():
    with filling_llm([]) as llm:
        assert llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=12).text == "xmr!"
        short = llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=2)
        assert len(short.tokens) == 2 and short.finish_reason == "length"
        with pytest.raises(UnsupportedCombinationError, match="suffix"):
            llm.generate("f(", decoder="self-infill", constraint=Regex("a+"))
    with LLM(ScriptedModel(), tokenizer=TOKENIZER, cache_positions=256) as llm:
        with pytest.raises(UnsupportedCombinationError, match="fill-in-the-middle model"):
            llm.generate("f(", decoder="self-infill")
    with pytest.raises(InvalidRequestError):
        SelfInfill(threshold=2)
    with pytest.raises(InvalidRequestError):
        SelfInfill(sentinels="a b")


def test_names_exist_only_with_a_monitor():
    pytest.importorskip("jedi")
    assert unknown_names(6, watched=True) == 0
    assert unknown_names(6, watched=False) > 0.5


def test_a_monitor_constrains_a_name_started_in_the_prompt():
    names = {"alpha"}
    model = ScriptedModel(lambda seen: np.where(np.arange(259) < 123, 0.0, -1e9))
    with LLM(model, tokenizer=TOKENIZER, cache_positions=512) as llm:
        watched = Monitor(completions=lambda text: names if text == "x = c." else ())
        options = {"max_tokens": 5, "temperature": 1.0, "seed": 1}
        for decoder in ("autoregressive", "prompt-lookup", "auto"):
            found = llm.generate("x = c.al", constraint=watched, decoder=decoder, **options)
            assert found.text.startswith("pha")
        with pytest.raises(InvalidRequestError, match="constraint"):
            llm.generate("x", decoder="monitors", constraint=Regex("a"))
        with pytest.raises(InvalidRequestError):
            llm.generate("x", constraint="asap")


def test_a_monitor_without_jedi_raises_missing_package_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "jedi", None)
    with pytest.raises(MissingPackageError, match=r"anydecode\[monitors\]"):
        Monitor("x").start(TOKENIZER, 259)


def test_every_exact_drafter_drafts_forced_tokens():
    schema = {"type": "object", "properties": {"a_long_name": {"type": "boolean"}},
              "required": ["a_long_name"], "additionalProperties": False}  # fmt: skip
    constraint = JsonSchema(schema, whitespace="")
    with LLM(ScriptedModel(seed=2), tokenizer=TOKENIZER, cache_positions=1024) as llm:
        plain = llm.generate("x", constraint=constraint, decoder="autoregressive")
        for decoder in ("prompt-lookup", "suffix", "token-recycling", "lookahead", "stand", "taps"):
            fast = llm.generate("x", constraint=constraint, decoder=decoder)
            assert fast.tokens == plain.tokens
            assert fast.stats.passes * 4 < plain.stats.passes, decoder


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


def test_extra_properties_are_forbidden_unless_the_schema_mentions_them():
    person = {"type": "object", "properties": {"name": {"type": "string"}}}
    held, free = JsonSchema(person), JsonSchema(person, extra_properties=True)
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

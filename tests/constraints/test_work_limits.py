"""Bounds on the work and memory of constraints: caches, searches, walks over schemas, threads."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import anydecode
from anydecode import LLM, JsonSchema
from anydecode.constraints import guidance_engine, patterns
from anydecode.constraints.byte_cache import (
    ENTRY_BYTES,
    ByteCache,
    allocated_bytes,
    byte_cached,
)
from anydecode.constraints.guidance_engine import tokenizer_binding
from anydecode.constraints.json import forced_completion, json_schema, narrowing
from anydecode.constraints.json import shortest_completion as shortest_completion_module
from anydecode.constraints.json.checking import IncrementalJsonValidator, Validator
from anydecode.constraints.json.completion_hints import SchemaHints
from anydecode.constraints.json.forced_completion import ForcedCompletion
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.shortest_completion import (
    MAX_WORK,
    MAX_WORK_PER_TRY,
    search_completion,
    shortest_completion,
)
from anydecode.constraints.json.termination import cannot_terminate
from anydecode.constraints.languages import Grammar, Regex
from anydecode.constraints.monitors import Monitor
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

TOKENIZER = ByteTokenizer()
SIZE = TOKENIZER.vocab_size
needs_allocator_report = pytest.mark.skipif(
    allocated_bytes() is None, reason="the C library does not report what is allocated"
)
#: Folders that handle what users send.
FOLDERS = ("api", "constraints", "decoders", "engine", "models", "sampling", "scoring", "server")


def test_python_matches_only_patterns_of_this_package() -> None:
    """The pattern given to `re` is a literal, or a name in capitals (a constant) in every call."""
    root = Path(anydecode.__file__).parent
    num_calls = 0
    for path in (file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        code = path.read_text()
        if "import re\n" not in code:
            continue
        tree = ast.parse(code)
        constants = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
                continue
            num_calls += 1
            parts = [part for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)]
            assert all(part.id in constants for part in parts), f"{path}:{node.lineno}"
    assert num_calls > 10


def test_a_cache_keeps_the_latest_values_within_its_bytes() -> None:
    cache: ByteCache[str, int] = ByteCache(4 * ENTRY_BYTES + 100)
    for number, key in enumerate("abcd"):
        cache.put(key, number, 20)
    assert cache.get("a") == 0
    cache.put("e", 4, 20)  # "b" has not been used for longest
    assert [key for key in "abcde" if key in cache] == ["a", "c", "d", "e"]
    cache.put("f", 5, 1 << 20)  # too large to be kept
    cache.put("a", 6, 30)
    assert cache.get("f") is None and cache.get("a") == 6
    assert cache.num_bytes == 4 * ENTRY_BYTES + 90 <= cache.max_bytes


def test_cached_functions_of_texts_are_bounded_by_the_texts() -> None:
    calls = []

    @byte_cached(1 << 16)
    def length(text: Any) -> int:
        calls.append(text)
        return len(text)

    assert [length("ab"), length("ab"), length([1])] == [2, 2, 1] and calls == ["ab", [1]]
    for number in range(40):
        length(str(number) * 2000)
    length("ab")
    assert calls.count("ab") == 2


def schema_with(number: int) -> dict[str, Any]:
    """A schema whose compiled form takes some hundred kilobytes."""
    names = {f"p{number}_{i}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for i in range(100)}
    return {"type": "object", "properties": names}


def test_compiled_grammars_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance_engine, "MAX_TEMPLATE_BYTES", 2 << 20)
    monkeypatch.setattr(json_schema, "_COMPILED", ByteCache(2 << 20))
    tokenizer = ByteTokenizer()
    binding = tokenizer_binding(tokenizer, SIZE)
    for number in range(20):
        JsonSchema(schema_with(number)).start(tokenizer, SIZE)
        assert binding._templates.num_bytes <= 2 << 20
        assert json_schema._COMPILED.num_bytes <= 2 << 20
    assert 0 < len(binding._templates) < 20 and 0 < len(json_schema._COMPILED) < 20


def test_nobody_waits_for_another_tokenizer_to_be_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    make = guidance_engine.TokenizerBinding.__init__

    def wait(*arguments: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        make(*arguments)

    known = tokenizer_binding(TOKENIZER, SIZE)
    monkeypatch.setattr(guidance_engine.TokenizerBinding, "__init__", wait)
    slow = threading.Thread(target=tokenizer_binding, args=(ByteTokenizer(), SIZE))
    slow.start()
    assert begun.wait(60)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(tokenizer_binding(TOKENIZER, SIZE)))
    other.start()
    other.join(10)
    assert found == [known]
    may_end.set()
    slow.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which prepares a tokenizer, or uses a cache."""
    begun, may_end = threading.Event(), threading.Event()
    make = guidance_engine.TokenizerBinding.__init__
    cache: ByteCache[str, int] = ByteCache(1 << 20)

    def wait(*arguments: Any) -> None:
        with cache._lock:
            begun.set()
            assert may_end.wait(60)
        make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(guidance_engine.TokenizerBinding, "__init__", wait)
        slow = threading.Thread(target=tokenizer_binding, args=(ByteTokenizer(), SIZE))
        slow.start()
        assert begun.wait(60)
    context = multiprocessing.get_context("fork")

    def use() -> None:
        cache.put("a", 1, 1)
        JsonSchema({"type": "boolean"}).start(ByteTokenizer(), SIZE)

    child = context.Process(target=use)
    child.start()
    child.join(30)
    is_waiting = child.is_alive()
    if is_waiting:
        child.kill()
        child.join()
    may_end.set()
    slow.join()
    assert not is_waiting and child.exitcode == 0


def test_values_that_grow_in_use_are_counted_as_grown() -> None:
    cache: ByteCache[str, object] = ByteCache(3 * ENTRY_BYTES + 1000)
    values = {key: object() for key in "abc"}
    for key, value in values.items():
        cache.put(key, value, 100)
    cache.grow("a", values["a"], 300, 500)
    cache.grow("b", object(), 300, 500)  # not the one that is kept
    assert cache.num_bytes == 3 * ENTRY_BYTES + 600
    cache.grow("c", values["c"], 500, 800)  # "a" has not been used for longest
    assert [key for key in "abc" if key in cache] == ["b", "c"]
    cache.grow("c", values["c"], 300, 800)
    assert "c" not in cache and cache.num_bytes == ENTRY_BYTES + 100


def walk_constant(number: int, length: int, tokenizer: ByteTokenizer) -> Any:
    """The state within a constant of a pattern, before which the text has a choice: the lexer makes
    the states of the constant when it is reached."""
    constant = "".join(chr(97 + (number + i * i + i // 7) % 26) for i in range(length))
    state = Regex(f"x[{number}-9]y{constant}").start(tokenizer, SIZE)
    for token in b"x9y":
        state.mask()
        state.advance(token)
    state.mask()
    return state


@needs_allocator_report
def test_compiled_grammars_count_what_their_lexers_learn_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guidance_engine, "MAX_TEMPLATE_BYTES", 24 << 20)
    monkeypatch.setattr(guidance_engine, "_CALLS_PER_MEASUREMENT", 0)
    tokenizer = ByteTokenizer()
    binding = tokenizer_binding(tokenizer, SIZE)
    for length in (100, 10_000):
        for number in range(9):
            walk_constant(number, length, tokenizer)
    counted, used = binding._templates.num_bytes, allocated_bytes()
    assert counted <= 24 << 20 and len(binding._templates) > 2
    binding.clear()
    left = allocated_bytes()
    assert used is not None and left is not None
    # The matchers of the states, which have ended, were counted too.
    assert 4 << 20 < used - left < counted < 2 * (used - left)


class SimulatedSystem:
    """The clock, the reports of what is allocated, and the memory of a process. A report takes
    `report_seconds`, and a call of a matcher as long as `call` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report_seconds: float) -> None:
        self.now, self.num_reports, self.report_seconds = 0.0, 0, report_seconds
        self.memory, self.used_pages = 100 << 20, 0
        for name, function in (
            ("perf_counter", lambda: self.now), ("thread_time", lambda: self.now),
            ("allocated_bytes", self._report),
            ("resident_bytes", lambda: self.memory + self.used_pages),
        ):  # fmt: skip
            monkeypatch.setattr(guidance_engine, name, function)
        self.tokenizer = ByteTokenizer()
        self.binding = tokenizer_binding(self.tokenizer, SIZE)
        self.template = self.binding.template(Regex("[ab]+").guidance())
        self.num_reports = 0

    def _report(self) -> int:
        self.num_reports += 1
        self.now += self.report_seconds
        return self.memory

    def call(self, seconds: float, grown: int = 0, template: Any = None) -> None:
        """A call of a matcher, by which its grammar grows."""

        def work() -> None:
            self.now += seconds
            self.memory += grown

        self.binding.call(template or self.template, work)


@pytest.mark.parametrize("report_seconds", [3e-6, 5e-5, 1e-3, 0.1])
def test_measuring_compiled_grammars_takes_a_small_share_of_their_calls(
    monkeypatch: pytest.MonkeyPatch, report_seconds: float
) -> None:
    system = SimulatedSystem(monkeypatch, report_seconds)
    call_seconds = report_seconds / 2
    for _ in range(20_000):
        system.call(call_seconds)
    first = 12  # until the grammar is known not to grow
    assert (system.num_reports - first) * report_seconds <= 0.01 * 20_000 * call_seconds


@pytest.mark.parametrize("report_seconds", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("grown", [200, 10_000, 100_000])
def test_a_growing_grammar_is_found_within_some_memory(
    monkeypatch: pytest.MonkeyPatch, report_seconds: float, grown: int
) -> None:
    """Also after many calls without growth, however long a report takes."""
    system = SimulatedSystem(monkeypatch, report_seconds)
    grammar = system.template.grammar
    for _ in range(3000):
        system.call(2e-5)
    start, seconds = system.memory, 1e-4
    while system.binding.has_template(grammar):
        system.call(seconds, grown)
        assert system.memory - start < 200 << 20
    # What is counted late: growth of the process, and what a check of it comes late.
    late = (4 << 20) + grown * (0.05 / seconds + 10)
    assert system.memory - start <= system.template.max_bytes + late


@pytest.mark.parametrize("report_seconds", [0.0, 1e-5, 0.1])
def test_a_text_ends_whose_grammar_takes_too_much_memory(
    monkeypatch: pytest.MonkeyPatch, report_seconds: float
) -> None:
    system = SimulatedSystem(monkeypatch, report_seconds)
    state = Regex("[ab]+").start(system.tokenizer, SIZE)
    start = system.memory
    while not system.template.is_too_large:
        system.call(1e-4, 100_000)
        assert system.memory - start < 400 << 20
    state.advance(ord("a"))
    with pytest.raises(ConstraintError, match="more than 128 MiB"):
        state.mask()
    again = Regex("[ab]+").start(system.tokenizer, SIZE)  # compiled again
    again.advance(ord("a"))
    assert again.mask().any()


def test_texts_end_whose_grammars_take_too_much_memory_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = SimulatedSystem(monkeypatch, 1e-5)
    grammars = [Regex(f"[ab]+{number}").guidance() for number in range(20)]
    templates = [system.binding.template(grammar) for grammar in grammars]
    start = system.memory
    for _ in range(10_000):
        for template in [one for one in templates if not one.is_too_large]:
            system.call(1e-4, 100_000, template)
    assert all(template.is_too_large for template in templates)
    # Alone each takes up to 200 MiB.
    assert system.memory - start < (512 << 20) + 20 * (110 << 20) < 20 * (150 << 20)


@pytest.mark.parametrize("in_calls", [0.0, 0.3, 1.0])
def test_what_others_allocate_ends_no_text(
    monkeypatch: pytest.MonkeyPatch, in_calls: float
) -> None:
    """Buffers come and go, in calls and between them; between them memory grows, too."""
    system, random = SimulatedSystem(monkeypatch, 1e-5), Random(0)
    for number in range(20_000):
        buffer = random.choice((-3, 3)) << 20
        system.memory += (1 << 20 if number < 5000 else 0) + int(buffer * (1 - in_calls))
        system.call(1e-4, int(buffer * in_calls))
        system.memory -= buffer
    assert not system.template.is_too_large


def test_pages_that_others_use_for_the_first_time_end_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a key-value cache, which was allocated before."""
    system = SimulatedSystem(monkeypatch, 1e-5)

    def use_pages() -> None:
        system.now, system.used_pages = system.now + 1e-4, system.used_pages + (1 << 20)

    for number in range(5000):
        system.memory += (1 << 20) if number < 200 else 0
        system.binding.call(system.template, use_pages)
    assert system.template.num_alone and not system.template.is_too_large


@needs_allocator_report
def test_a_grammar_that_grows_much_is_compiled_again_when_no_text_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guidance_engine, "MAX_TEMPLATE_GROWTH", 1 << 20)
    monkeypatch.setattr(guidance_engine, "_CALLS_PER_MEASUREMENT", 0)
    tokenizer = ByteTokenizer()
    binding = tokenizer_binding(tokenizer, SIZE)
    state = walk_constant(0, 10_000, tokenizer)
    grammar = state.origin
    template = state._template
    assert not binding.has_template(grammar) and binding.template(grammar) is template
    del state, template
    assert len(binding._used) == 0
    binding.template(grammar)
    assert binding.has_template(grammar)


def test_a_lexer_at_its_limit_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**guidance_engine._LIMITS, "max_lexer_states": 2000}
    monkeypatch.setattr(guidance_engine, "_LIMITS", limits)
    tokenizer = ByteTokenizer()
    schema = JsonSchema({"enum": [f"{number:b}".zfill(10) * 50 for number in range(20)]})
    for _ in range(2):
        failures = 0
        for number in range(20):
            try:
                state = schema.start(tokenizer, SIZE)
                for byte in json.dumps(f"{number:b}".zfill(10) * 50).encode():
                    state.mask()
                    state.advance(byte)
            except ConstraintError as error:
                assert "too many states" in str(error)
                failures += 1
        assert 0 < failures < 10


def test_compiled_patterns_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_searchers", ByteCache(1 << 20))
    for number in range(30):
        assert patterns.matches(f"^[a-z]{{{number + 1}}}" + "b{200}" * 5, "x") is False
    assert 0 < len(patterns._searchers) < 30 and patterns._searchers.num_bytes <= 1 << 20


def chain(length: int, last: Any, **node: Any) -> dict[str, Any]:
    """Definitions each of which contains two references to the next, under every key of `node`."""
    definitions: dict[str, Any] = {f"d{length}": last}
    for i in range(length):
        text = json.dumps(node).replace("NEXT", f"#/$defs/d{i + 1}")
        definitions[f"d{i}"] = json.loads(text)
    return {"$ref": "#/$defs/d0", "$defs": definitions}


@pytest.mark.parametrize("length", [3, 60])  # 2 ** 60 steps without memory
def test_doubled_references_are_followed_once(length: int) -> None:
    twice = [{"$ref": "NEXT"}, {"$ref": "NEXT"}]
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    assert not cannot_terminate(chain(length, {"type": "integer"}, allOf=twice))
    assert cannot_terminate(chain(length, endless, allOf=twice))
    assert cannot_terminate(chain(length, endless, anyOf=twice))
    assert not cannot_terminate(chain(length, endless, anyOf=[{"$ref": "NEXT"}, {"enum": [1]}]))


def test_narrowed_forms_of_nested_negations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(3):
        schema = {
            "type": "object",
            "minProperties": 3,
            "not": {"propertyNames": {"pattern": "^a"}},
            "additionalProperties": schema,
        }
    size = len(json.dumps(schema))
    assert narrowed_schema(schema, 0, size) is not None
    monkeypatch.setattr(narrowing, "_MAX_NODES", 1000)
    assert narrowed_schema(schema, 0, size) is None


def test_the_best_object_for_some_names_is_the_first_with_the_most_of_them() -> None:
    parts = [{"properties": dict.fromkeys(names, {})} for names in ("ab", "bc", "abcd", "cd")]
    hints = SchemaHints({"anyOf": parts})
    for allowed in ({"a"}, {"c", "d"}, {"b", "c"}, {"a", "b", "c", "d"}, set("z")):
        slow = max(hints._objects, key=lambda entry: len(entry.sizes.keys() & allowed))
        assert hints._objects[hints._best_object(allowed)] == slow


def test_a_search_ends_when_its_work_is_done() -> None:
    constraint = JsonSchema({"type": "object", "minProperties": 20})
    state = constraint.start(TOKENIZER, SIZE)
    hints = constraint.completion_hints
    completion, work = search_completion(state, TOKENIZER, hints, MAX_WORK)
    assert completion == shortest_completion(state, TOKENIZER, hints) is not None
    found, less = search_completion(state, TOKENIZER, hints, work // 4)
    assert found is None and work // 4 < less < work


def test_masks_within_a_long_constant_are_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask takes time for each character of a constant that the text is in."""
    num_masks = 0
    compute_mask = guidance_engine.GuidanceState._compute_mask

    def counted(state: Any) -> Any:
        nonlocal num_masks
        num_masks += 1
        return compute_mask(state)

    monkeypatch.setattr(guidance_engine.GuidanceState, "_compute_mask", counted)

    def masks_of_search(length: int) -> int:
        nonlocal num_masks
        schema = {"type": "object", "additionalProperties": {"const": "x" * length}}
        constraint = JsonSchema({**schema, "description": "d" * 90_000})
        state = constraint.start(TOKENIZER, SIZE)
        for token in b'{"a": "xx':
            state.advance(token)
        num_masks = 0
        search_completion(state, TOKENIZER, constraint.completion_hints, MAX_WORK)
        return num_masks

    assert masks_of_search(100) > 90
    assert 0 < masks_of_search(70_000) < 30


def test_forced_tokens_are_found_some_at_a_time() -> None:
    state = JsonSchema({"const": "x" * 5000}).start(TOKENIZER, SIZE)
    forced = state.forced_tokens()
    assert 64 <= len(forced) < 512
    assert bytes(forced) == b'"' + b"x" * (len(forced) - 1)


def ambiguous(count: int) -> str:
    """A grammar whose masks after the first token take time in the cube of `count`."""
    unit = 'q ")" | b? ")" | b? ")" | '
    return f'root ::= "x" q\nq ::= "a" b | [0-9]+ "x"\nb ::= {unit * count}"c"'


def test_large_ambiguous_grammars_are_refused() -> None:
    """One of 52,000 characters compiled at once, and took 40 seconds for each mask after it."""
    with pytest.raises(ConstraintError, match="refers to rules 6006 times"):
        Grammar(ambiguous(2000), syntax="gbnf").start(TOKENIZER, SIZE)
    state = Grammar(ambiguous(100), syntax="gbnf").start(TOKENIZER, SIZE)
    state.advance(ord("x"))
    assert state.allows(ord("a"))
    words = " | ".join(f'"word{number}"' for number in range(20_000))
    assert Grammar(f"root ::= {words}", syntax="gbnf").start(TOKENIZER, SIZE).allows(ord("w"))


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, -9.3e18, -1e300])
def test_integers_at_the_end_of_64_bits_do_not_end_the_process(number: float) -> None:
    """llguidance overflows its stack where a range has no integer above the smallest."""
    schemas: list[dict[str, Any]] = [
        {"const": number},
        {"enum": [3, "a", {"b": [number]}]},
        {"type": "integer", "const": number},
        {"allOf": [{"type": "integer"}, {"enum": [number]}]},
        {"type": "integer", "minimum": number, "maximum": number},
        {"type": "integer", "exclusiveMaximum": number},
        {"properties": {"a": {"anyOf": [{"const": number}, {"type": "integer"}]}}},
    ]
    for schema in schemas:
        constraint: Any
        for constraint in (
            JsonSchema(schema),
            Grammar(f'start: %json {json.dumps(schema)} | "x"'),
            Grammar(f"start: %json\n  {json.dumps({'allOf': [schema]})}"),
        ):
            try:
                assert constraint.start(TOKENIZER, SIZE).mask().any()
            except ConstraintError as error:
                assert "\n" not in str(error)
    wide = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    state = JsonSchema(wide).start(TOKENIZER, SIZE)
    assert all(state.allows(token) for token in b"-019") and not state.allows(ord("a"))


def test_the_searches_of_an_answer_share_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def search(state: Any, tokenizer: Any, hints: Any, max_work: int) -> tuple[None, int]:
        limits.append(max_work)
        return None, 40

    monkeypatch.setattr(forced_completion, "search_completion", search)
    monkeypatch.setattr(shortest_completion_module, "MAX_WORK_PER_TRY", 100)
    constraint = JsonSchema({"type": "array", "items": {"type": "integer"}})
    state: Any = constraint.start_with_limit(TOKENIZER, SIZE, 512)
    assert isinstance(state, ForcedCompletion)
    draft = None
    for token in b"[" + b"1," * 200:
        state.advance(token)
        if draft is None and limits:
            draft = state.fork()
    assert limits == [50, 30, 10, *[0] * (len(limits) - 3)] and len(limits) < 12
    # The work belongs to the text: a fork, or a text after a rollback, has that of its own tokens.
    again = len(limits)
    for token in b"1," * 200:
        draft.advance(token)
    assert limits[again : 2 * again - 1] == limits[1:again]


@pytest.mark.parametrize("has_reasoning", [False, True])
def test_later_tries_of_an_answer_search_less(
    has_reasoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def search(state: Any, tokenizer: Any, hints: Any, max_work: int) -> tuple[None, int]:
        limits.append(max_work)
        return None, 0

    monkeypatch.setattr(forced_completion, "search_completion", search)
    constraint: Any = JsonSchema({"type": "array", "items": {"type": "integer"}})
    if has_reasoning:
        constraint = AfterReasoning(constraint, "<t>", "</t>", False)
    state: Any = constraint.start_with_limit(TOKENIZER, SIZE, 64)
    state.limit_searches(9)
    branch = state.fork().with_banned([ord("]")])
    for token in b"[" + b"1," * 8:
        branch.advance(token)
    assert limits == [MAX_WORK_PER_TRY // 10 // 2]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_all_tries_of_an_answer_have_bounded_work(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []
    run = shortest_completion_module._Search.run

    def recorded(search: Any) -> Any:
        tokens = run(search)
        spent.append(search.work)
        return tokens

    monkeypatch.setattr(shortest_completion_module._Search, "run", recorded)
    item: dict[str, Any] = {"const": "x"}
    for number in range(6):
        names = {f"name{number}": item, "k": {"const": f"constant value {number}"}}
        item = {"type": "object", "properties": names, "required": [*names]}
    options = [item, {"type": "integer"}, {"enum": [f"v{number}" for number in range(40)]}]
    schema = {"type": "array", "uniqueItems": True, "minItems": 30, "items": {"anyOf": options}}
    model = ScriptedModel(vocab_size=SIZE, seed=1)
    with LLM(model, tokenizer=TOKENIZER) as llm:
        answer = llm.generate(
            "a", constraint=JsonSchema(schema), max_tokens=300, temperature=temperature, seed=1
        )
    report = answer.constraint
    assert report is not None and report["tries"] > 1
    assert max(spent) < 1.2 * MAX_WORK and sum(spent) < 8 * MAX_WORK_PER_TRY


def test_a_short_limit_takes_the_shortest_text_that_is_known() -> None:
    constraint = JsonSchema({"type": "object", "minProperties": 20})
    constraint.start_with_limit(TOKENIZER, SIZE, 200)
    shortest = constraint.completion_hints.shortest[TOKENIZER].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forced_completion, "search_completion", None)
        first: Any = constraint.start_with_limit(TOKENIZER, SIZE, len(shortest) + 9)
        state = first.fork()
        for token in shortest:
            assert state.is_completing and state.mask().argmax() == token
            state.advance(token)
    # One that cannot fit is not searched again, at any token.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forced_completion, "search_completion", None)
        short: Any = constraint.start_with_limit(TOKENIZER, SIZE, 40)
        for token in b'{"a":1,"b":2,':
            short.advance(token)
    # The shortest text of a constraint is not one of a state that forbids it.
    assert forced_completion.is_end(first.inner, shortest)
    assert not forced_completion.is_end(first.with_banned([ord("{")]).inner, shortest)


def test_what_applies_to_a_value_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "type": "array",
        "items": {"allOf": [{"type": "integer"}] * 50, "not": {"const": 7}},
    }
    validator = Validator(schema, 100)
    lookups = []
    node = Validator.node
    monkeypatch.setattr(
        Validator, "node", lambda self, pointer: lookups.append(pointer) or node(self, pointer)
    )

    def push(text: bytes) -> list[int | None]:
        incremental = IncrementalJsonValidator(validator, TOKENIZER)
        return [incremental.push(byte) for byte in text]

    assert push(b"[1,2,3]") == [None] * 7
    count = len(lookups)
    assert push(b"[" + b"1," * 200 + b"1]") == [None] * 403
    assert count < len(lookups) + 1 and len(lookups) - count < 500
    assert push(b"[7]")[-1] == 1


def test_a_compiled_schema_can_be_sent_to_another_process() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    constraint = JsonSchema(schema)
    constraint.warm(TOKENIZER, SIZE)
    copy = pickle.loads(pickle.dumps(constraint))
    assert copy.report() == constraint.report()
    assert copy.is_valid("[1, 2]") and not copy.is_valid("[1, 1]")
    tokenizer = ByteTokenizer()
    assert not copy.is_warm(tokenizer, SIZE)
    copy.warm(tokenizer, SIZE)
    assert copy.is_warm(tokenizer, SIZE)
    checked = copy.incremental_validator(tokenizer)
    assert [checked.push(byte) for byte in b"[1,1]"] == [None] * 4 + [0]


def test_the_answer_after_the_reasoning_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = ByteTokenizer()
    constraint = AfterReasoning(JsonSchema({"enum": [12]}), "<t>", "</t>", True)
    state = constraint.start_with_limit(tokenizer, SIZE, 64)
    guidance_engine.clear_templates()

    def compile_again(*arguments: Any) -> None:
        raise ConstraintError("compiled on the engine's thread")

    monkeypatch.setattr(guidance_engine.TokenizerBinding, "template", compile_again)
    for token in b"hm</t>12":
        assert state.allows(token)
        state.advance(token)
    assert state.finished


def test_static_analysis_runs_on_a_thread_of_its_own() -> None:
    threads = []

    def names(text: str) -> list[str]:
        threads.append(threading.current_thread())
        return ["real", "imag"]

    state = Monitor("x", completions=names).start(TOKENIZER, SIZE)
    for token in b".re":
        assert state.allows(token)
        state.advance(token)
    assert not state.allows(ord("x")) and state.allows(ord("a"))
    assert threads and threading.current_thread() not in threads


def test_narrowed_forms_are_compiled_with_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ByteTokenizer()
    schema = {"type": "array", "contains": {"const": 3}, "items": {"type": "integer"}}
    constraint = JsonSchema(schema)
    constraint.warm(tokenizer, SIZE)
    monkeypatch.setattr(json_schema, "narrowed_schema", None)
    monkeypatch.setattr(JsonSchema, "_compile", None)
    for index in range(4):
        narrowed = constraint.narrowed(index)
        assert narrowed is not None and narrowed.is_warm(tokenizer, SIZE)
        assert narrowed.start(tokenizer, SIZE).allows(ord("["))
    guidance_engine.clear_templates()
    assert not constraint.is_warm(tokenizer, SIZE)


def test_a_narrowed_form_that_cannot_be_enforced_fails_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    json_schema.clear_compiled()
    constraint = JsonSchema({"type": "array", "uniqueItems": True})
    narrowed = constraint.narrowed(0)
    assert narrowed is not None
    calls = []

    def fail(self: JsonSchema, *arguments: Any) -> None:
        calls.append(self)
        raise ConstraintError("too large")

    monkeypatch.setattr(JsonSchema, "_compile", fail)
    narrowed.warm(TOKENIZER, SIZE)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="too large"):
            narrowed.start(TOKENIZER, SIZE)
    assert len(calls) == 1 and narrowed.is_warm(TOKENIZER, SIZE)


def releases_interpreter_lock(call: Callable[[], object]) -> bool:
    """Whether another thread gets the interpreter lock during `call`. No switch interval takes it
    away here."""
    counts: list[int] = []
    num_ticks, interval = 0, sys.getswitchinterval()

    def run() -> None:
        before = num_ticks
        call()
        counts.append(num_ticks - before)

    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        while not counts:
            time.sleep(0.0001)
            num_ticks += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    return counts[0] > 0


def test_compilation_and_masks_release_the_interpreter_lock() -> None:
    binding = tokenizer_binding(TOKENIZER, SIZE)
    mask = np.empty((SIZE + 31) // 32, np.int32)
    matcher: Any = None

    def start() -> None:
        nonlocal matcher
        guidance_engine.clear_templates()
        grammar = Grammar("start: /[xy]" + r"\w*" * 800 + "/").guidance()
        matcher = binding.template(grammar).matcher.deep_copy()

    def compute() -> None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    # On a busy machine the other thread may miss the lock: each is tried some times.
    assert any(releases_interpreter_lock(start) for _ in range(20))
    for _ in range(20):
        start()
        assert matcher.try_consume_tokens([ord("x")])
        if releases_interpreter_lock(compute):
            break
    else:
        pytest.fail("masks hold the interpreter lock")
    assert not releases_interpreter_lock(lambda: sum(range(1_000_000)))

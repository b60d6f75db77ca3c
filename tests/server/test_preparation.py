"""Hostile constraints and templates through the server, and the constraints that it keeps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anydecode.api.llm import LLM
from anydecode.constraints.guidance_engine import TokenizerBinding
from anydecode.errors import ConstraintError
from anydecode.models.scripted import ScriptedModel
from anydecode.models.tokenizers import HFTokenizer
from anydecode.server.preparation import Preparation
from anydecode.server.settings import Settings
from anydecode.server.tools import constraint_factory
from anydecode.server.workers import WorkerPool
from server_client import CHAT, COMPLETIONS, Client
from server_client import served as served_briefly

LIMIT = ("deadline", "memory limit")
CHAIN = 40
SMALL = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def alternatives(groups: int, options: int) -> dict[str, Any]:
    """`allOf` of `anyOf`: as many alternatives as `options` to the power of `groups`."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"p{i}_{j}": {"type": "integer"}}, "required": [f"p{i}_{j}"]}
                    for j in range(options)
                ]
            }
            for i in range(groups)
        ]
    }


def doubled(node: dict[str, Any]) -> dict[str, Any]:
    """A chain of definitions, each of which refers twice to the next."""
    definitions: dict[str, Any] = {f"d{CHAIN}": {"type": "integer"}}
    for i in range(CHAIN):
        text = json.dumps(node).replace("NEXT", f"#/$defs/d{i + 1}")
        definitions[f"d{i}"] = json.loads(text)
    return {"$ref": "#/$defs/d0", "$defs": definitions}


NEXT = {"$ref": "NEXT"}
REFUSED = {
    "allOf of anyOf": alternatives(12, 8),
    "a long constant": {"const": "x" * 100_000},
}
HARMLESS = {
    "names": {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}},
    "pattern": {"type": "string", "pattern": "^(a+)+$"},
    "properties": {"type": "object", "patternProperties": {"^(a+)+$": {"type": "integer"}}},
    "many properties": {"type": "object", "minProperties": 60},
    "doubled references": doubled(
        {"type": "object", "properties": {"a": NEXT, "b": NEXT}, "required": ["a", "b"]}
    ),
    "doubled parts": doubled({"allOf": [NEXT, NEXT]}),
}


@contextmanager
def served(llm: LLM, **settings: Any) -> Iterator[Client]:
    """A client that waits longer than others, as processes may have to start."""
    with served_briefly(llm, **settings) as client:
        client.http.timeout = 250
        yield client


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with served(llm) as client:
        yield client


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.slow
@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_schemas_that_take_too_long_are_refused_with_the_limit(client: Client, schema: Any) -> None:
    error = client.refused(COMPLETIONS, response_format=formatted(schema))
    assert any(limit in error["message"] for limit in LIMIT), error
    assert error["code"] == "limit_exceeded" and "\n" not in error["message"]
    assert client.ask(COMPLETIONS, response_format=formatted(SMALL))


@pytest.mark.parametrize("schema", HARMLESS.values(), ids=HARMLESS)
def test_schemas_that_only_look_expensive_are_accepted(client: Client, schema: Any) -> None:
    assert client.ask(COMPLETIONS, response_format=formatted(schema))


def test_the_schemas_of_tools_are_limited_too(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": alternatives(12, 8)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with served(llm, prepare_seconds=0.5) as client:
        error = client.refused(CHAT, tools=tools, tool_choice="required")
        assert error["code"] in ("limit_exceeded", "constraint_error")
        assert client.ask(COMPLETIONS)


def text_tokenizer(template: str | dict[str, str]) -> HFTokenizer:
    """One token per byte, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return HFTokenizer(backend, eos_ids=[256], templates=template)


def test_a_template_of_its_own_for_tools_is_used() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tool_use = "<tool_call>{{ tools[0].function.name }}|{{ messages | length }}"
    tokenizer = text_tokenizer({"default": plain, "tool_use": tool_use})
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    messages = [{"role": "user", "content": "abc"}]
    model = ScriptedModel(vocab_size=tokenizer.vocab_size, seed=1)
    with LLM(model, tokenizer=tokenizer) as llm, served_briefly(llm) as client:

        def prompt(**fields: Any) -> str:
            answer = client.http.post("/tokenize", json={"messages": messages, **fields}).json()
            text: str = tokenizer.decode(answer["tokens"])
            return text

        assert prompt(tools=tools) == "<tool_call>look_up|1"  # without a note in a system message
        assert prompt() == "abc"


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template, limit",
    [
        (LOOP, "deadline"),
        ("{{ 'x' | center(3000000000) }}", "a width is too large"),
    ],
    ids=["endless", "large"],
)
def test_templates_are_rendered_within_limits(template: str, limit: str) -> None:
    conditional = "{% if messages[0].content == 'bad' %}" + template + "{% endif %}" + TEXT
    model = ScriptedModel(vocab_size=257, seed=1)
    with LLM(model, tokenizer=text_tokenizer(conditional), cache_positions=256) as llm:
        with served(llm, prepare_seconds=0.5) as client:
            assert limit in client.refused(CHAT, "bad")["message"]
            for _ in range(2):  # in a worker process, then on the event loop
                assert client.ask(CHAT, "good")["usage"]["prompt_tokens"] == 4


def test_a_template_that_takes_long_once_it_is_known_goes_back_to_a_process() -> None:
    template = "{% if messages[0].content == 'bad' %}" + LOOP + "{% endif %}" + TEXT
    model = ScriptedModel(vocab_size=257, seed=1)
    with LLM(model, tokenizer=text_tokenizer(template), cache_positions=256) as llm:
        with served(llm, prepare_seconds=0.5) as client:
            client.ask(CHAT, "good")
            assert "deadline" in client.refused(CHAT, "bad")["message"]


def test_long_prompts_are_tokenised_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydecode.server.preparation.LONG_TEXT", 100)
    model = ScriptedModel(vocab_size=257, seed=1)
    with LLM(model, tokenizer=text_tokenizer(TEXT), cache_positions=4096) as llm:
        with served(llm) as client:
            monkeypatch.setattr(HFTokenizer, "encode", None)  # this process does not call it
            text = "abc " * 50
            assert client.ask(COMPLETIONS, text)["usage"]["prompt_tokens"] == len(text)
            assert client.ask(CHAT, text)["usage"]["prompt_tokens"] == len(text)


def test_constraints_are_compiled_on_threads_that_nobody_waits_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on that of the engine, nor on that of the event loop."""
    threads, template = [], TokenizerBinding.template

    def recorded(binding: TokenizerBinding, grammar: str) -> Any:
        if not binding.has_template(grammar):
            threads.append((threading.current_thread().name, is_event_loop()))
        return template(binding, grammar)

    def is_event_loop() -> bool:
        with suppress(RuntimeError):
            return asyncio.get_running_loop() is not None
        return False

    monkeypatch.setattr(TokenizerBinding, "template", recorded)
    with served(llm) as client:
        schemas = [{"enum": ["once", "for this test"]}, {**SMALL, "minProperties": 2}]
        for schema in schemas:
            client.ask(CHAT, response_format=formatted(schema))
    assert len(threads) >= len(schemas)
    assert not [one for one in threads if one[0] == "anydecode" or one[1]], threads


async def test_the_first_constraint_finds_the_tokenizer_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To prepare it blocks the interpreter, and so the answers of other clients."""
    model = ScriptedModel(vocab_size=257, seed=1)
    with LLM(model, tokenizer=text_tokenizer(TEXT)) as llm:
        preparation = Preparation(llm, Settings())
        preparation.warm()
        monkeypatch.setattr(TokenizerBinding, "__init__", None)  # none is made from now on
        state = {"namespace": None, "client": "here"}
        make = constraint_factory(formatted(SMALL), None)
        assert (await preparation.constraint(state, make)).report().engine == "llguidance"


async def test_an_accepted_constraint_is_tried_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    run = WorkerPool.run

    async def recorded(self: WorkerPool, *arguments: Any) -> Any:
        jobs.append(arguments[4])
        return await run(self, *arguments)

    monkeypatch.setattr(WorkerPool, "run", recorded)
    preparation = Preparation(llm, Settings())
    state = {"namespace": None, "client": "here"}
    make = constraint_factory(formatted(SMALL), None)
    first = await preparation.constraint(state, make)
    assert await preparation.constraint(state, make) is first
    assert len(jobs) == 1
    other = await preparation.constraint(
        state, constraint_factory(formatted({**SMALL, "title": "other"}), None)
    )
    assert other is not first and len(jobs) == 2
    # Requests that come at the same time wait for one of them, and for the next if that fails.
    make = constraint_factory(formatted({**SMALL, "title": "at once"}), None)
    at_once = await asyncio.gather(*(preparation.constraint(state, make) for _ in range(5)))
    assert len({id(one) for one in at_once}) == 1 and len(jobs) == 3
    invalid = constraint_factory(formatted({"$ref": "#/none"}), None)
    tried = [preparation.constraint(state, invalid) for _ in range(3)]
    failed = await asyncio.gather(*tried, return_exceptions=True)
    assert [type(one) for one in failed] == [ConstraintError] * 3 and len(jobs) == 6


async def test_the_accepted_constraints_are_bounded_by_bytes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydecode.server.preparation.MAX_ACCEPTED_BYTES", 1 << 20)
    preparation = Preparation(llm, Settings())
    state = {"namespace": None, "client": "here"}
    for number in range(12):
        schema = {"enum": [f"{number} value {i}" for i in range(1000)]}
        await preparation.constraint(state, constraint_factory(formatted(schema), None))
        assert preparation._accepted.num_bytes <= 1 << 20
    assert 0 < len(preparation._accepted) < 12


async def test_a_constraint_from_a_process_gives_the_same_states(llm: LLM) -> None:
    from anydecode.constraints.json.json_schema import JsonSchema

    schema = {"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "minProperties": 2,
              "properties": {"ab": {"type": "array", "uniqueItems": True}}}  # fmt: skip
    preparation = Preparation(llm, Settings())
    state = {"namespace": None, "client": "here"}
    make = constraint_factory(formatted(schema), None)
    found: Any = await preparation.constraint(state, make)
    direct = JsonSchema(schema, max_string=0, extra_properties=True)
    tokenizer, size = llm.tokenizer, llm.model.spec.vocab_size
    assert tokenizer is not None
    states = [one.start_with_limit(tokenizer, size, 64) for one in (found, direct)]
    assert found.report() == direct.report()
    assert states[0].origin == states[1].origin
    assert found.completion_hints.shortest[tokenizer] == direct.completion_hints.shortest[tokenizer]
    assert found.completion_hints.values == direct.completion_hints.values
    assert found.is_valid('{"ab": [1, 2], "cc": 3}') and not found.is_valid(
        '{"ab": [1, 1], "x": 3}'
    )
    for index in range(4):
        one, other = found.narrowed(index), direct.narrowed(index)
        assert (one and one.schema) == (other and other.schema)

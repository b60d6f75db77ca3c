"""A fleet of two workers gives what one engine gives, with every option that it supports."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from anydecode import LLM
from anydecode.api.generation import Generation
from anydecode.certification.checks import scripted_llm
from anydecode.cluster.message import from_message, to_message
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.worker import Worker
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.languages import Choice, Grammar, Regex
from anydecode.constraints.predicate import Predicate
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.constraints.tools.families import TOOL_FORMATS
from anydecode.constraints.tools.tool_calls import ToolCalls
from anydecode.errors import (
    ContextLengthError,
    FleetError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.kernels.library import load_library
from anydecode.memory.spill import MemorySpill
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.sampling.banned_words import BannedWordTable
from worker_threads import SECRET, start_worker

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
PROMPT = "the cat sat on the mat and the dog " * 4
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def workers() -> list[LLM]:
    return [LLM(MODEL, **OPTIONS), LLM(MODEL, **OPTIONS)]


@pytest.fixture(scope="module")
def fleet(workers: list[LLM]) -> Iterator[FleetLLM]:
    with FleetLLM(MODEL, SECRET, **OPTIONS) as llm:
        threads = [
            start_worker(worker, llm.fleet_port, name=role, role=role)[1]
            for worker, role in zip(workers, ("prefill", "decode"), strict=True)
        ]
        yield llm
    for thread in threads:
        thread.join(20)


def results(answer: Generation) -> list[Any]:
    """Everything of an answer that does not depend on time or place."""
    return [
        (one.text, one.tokens, one.finish_reason, one.logprobs, one.constraint, one.seed)
        for one in answer.samples
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.0, "n": 3},
        {"n": 2},
        {"decoder": "prompt-lookup", "stop": ["e"], "temperature": 1.0},
        {"repetition_penalty": 1.3, "logit_bias": {65: 2.0}, "sampler": "mirostat"},
        {"constraint": JsonSchema(SCHEMA), "temperature": 1.0},
        {"constraint": JsonSchema({**SCHEMA, "not": {"required": ["m"]}}), "temperature": 1.0},
        {"constraint": Regex("[a-z]{5,9}"), "temperature": 1.0, "n": 2},
        {"guidance_scale": 1.5},
        {"banned_strings": ["the"], "temperature": 1.0},
        {"max_tokens": 0},
    ],
    ids=" ".join,
)
def test_answers_are_those_of_one_engine(
    alone: LLM, fleet: FleetLLM, options: dict[str, Any]
) -> None:
    options = {"max_tokens": 24, "seed": 5, **options}
    for prompt in ("a", PROMPT):
        expected, found = (llm.generate(prompt, **options) for llm in (alone, fleet))
        assert results(found) == results(expected)


def test_workers_get_the_sampling_options_that_the_model_recommends(
    alone: LLM, fleet: FleetLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended = {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2}
    monkeypatch.setattr(fleet, "sampling_defaults", recommended)
    for given in ({}, {"top_k": 0}, {"sampler": "min-p"}):
        found = fleet.generate("a", max_tokens=24, seed=5, **given)
        expected = alone.generate("a", max_tokens=24, seed=5, **{**recommended, **given})
        assert results(found) == results(expected)


def test_prompts_are_handed_over_and_their_rows_not_computed_again(
    fleet: FleetLLM, workers: list[LLM]
) -> None:
    handovers = fleet.status()["counts"]["handovers"]
    prompt = [65 + number % 26 for number in range(321)]
    answer = fleet.generate(prompt, max_tokens=4)
    assert fleet.status()["counts"]["handovers"] == handovers + 1
    assert answer.stats.num_cached_tokens == 320
    restored = [one.engine.runners["target"].prefixes.num_restored for one in workers]
    assert restored[0] == 0 and restored[1] >= 320
    again = fleet.generate([*prompt[:160], 1, *prompt[160:]], max_tokens=4)
    assert again.stats.num_cached_tokens >= 160


def test_a_tenant_finds_its_blocks_at_the_prefill_worker_and_nobody_else_does(
    fleet: FleetLLM, workers: list[LLM]
) -> None:
    prompt = [97 + number % 23 for number in range(161)]
    fleet.generate(prompt, max_tokens=2, namespace="a tenant")
    prefixes = workers[0].engine.runners["target"].prefixes
    assert len(prefixes.match(prompt, (-1, "a tenant"))) == 160
    assert len(prefixes.match(prompt, (-1, None))) == 0


def test_a_stream_is_the_same_text(alone: LLM, fleet: FleetLLM) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 2}
    chunks = list(fleet.stream(PROMPT, **options))
    assert "".join(chunk.text for chunk in chunks) == alone.generate(PROMPT, **options).text


def test_traces_come_at_the_end(alone: LLM, fleet: FleetLLM) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "decoder": "prompt-lookup", "trace": True}
    expected, found = (llm.generate(PROMPT, **options).trace for llm in (alone, fleet))
    assert [one["tokens"] for one in found or ()] == [one["tokens"] for one in expected or ()]


def test_a_cancelled_answer_ends_on_its_worker(fleet: FleetLLM) -> None:
    stream = fleet.stream("a", max_tokens=1000, ignore_eos=True)
    next(stream)
    stream.close()
    for _ in range(100):
        status = fleet.status()
        if not any(one["tasks"] for one in status["workers"]):
            break
        threading.Event().wait(0.05)
    assert status["running"] == status["waiting"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "first_finish": 1, "temperature": 1.0}, "does not support first_finish"),
        ({"segment": 3}, "does not support segment"),
        ({"prompt_logprobs": 1}, "does not support prompt_logprobs"),
        ({"constraint": Predicate(lambda text: True)}, "Predicate cannot be sent"),
        ({"decoder": "beam", "n": 2}, "n is 2"),
        ({"namespace": ("a", 1)}, "needs a text or a number"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, dict) else None,
)
def test_what_a_fleet_does_not_support_is_refused(
    fleet: FleetLLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fleet.generate("a", **options)


def test_measurements_are_refused(fleet: FleetLLM) -> None:
    with pytest.raises(UnsupportedCombinationError, match="generates text only"):
        fleet.score("a", "b")


def test_errors_of_requests_are_those_of_an_engine(fleet: FleetLLM) -> None:
    with pytest.raises(ContextLengthError):
        fleet.generate([65] * 100_000)
    with pytest.raises(InvalidRequestError, match="temperature"):
        fleet.generate("a", temperature=-1)


def test_an_error_of_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's cache is smaller than the proxy was told."""
    join_frame = Worker.join_frame
    monkeypatch.setattr(
        Worker, "join_frame", lambda *given: {**join_frame(*given), "positions": 4096}
    )
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        _, thread = start_worker(LLM(MODEL, threads=1, cache_positions=128), fleet.fleet_port)
        with pytest.raises(ContextLengthError, match="maximum context length is 128"):
            fleet.generate([65] * 300, max_tokens=4)
    thread.join(20)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"draft": MODEL, "dtype": "int8"},
            "the worker other has another draft dtype than the proxy",
        ),
        ({}, "the worker other has no draft model, and the proxy has one: .* the same --draft"),
    ],
    ids=["dtype", "draft"],
)
def test_workers_of_another_model_are_refused(options: dict[str, Any], problem: str) -> None:
    with FleetLLM(MODEL, SECRET, draft=MODEL, **OPTIONS) as fleet:
        worker = Worker(LLM(MODEL, **options, **OPTIONS), SECRET, name="other")
        with pytest.raises(FleetError, match=problem):
            asyncio.run(worker.run("127.0.0.1", fleet.fleet_port))
        worker.llm.close()


def test_a_worker_of_another_version_is_refused_whatever_else_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = {"type": "join", "name": "new", "facts": {"version": "9.9"}}
    monkeypatch.setattr(Worker, "join_frame", lambda *_: frame)
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet, LLM(MODEL, **OPTIONS) as llm:
        with pytest.raises(FleetError, match=r"the worker new has version 9\.9 of anydecode"):
            asyncio.run(Worker(llm, SECRET).run("127.0.0.1", fleet.fleet_port))


def test_a_name_that_is_no_label_is_refused() -> None:
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet, LLM(MODEL, **OPTIONS) as llm:
        with pytest.raises(FleetError, match="the name of a worker is 'a b'; give"):
            asyncio.run(Worker(llm, SECRET, name="a b").run("127.0.0.1", fleet.fleet_port))


def test_an_address_in_use_is_refused() -> None:
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with pytest.raises(InvalidRequestError, match="choose another --fleet-host"):
            FleetLLM(MODEL, SECRET, fleet_port=fleet.fleet_port, **OPTIONS)


def test_groups_are_those_of_equal_bits() -> None:
    from anydecode.cluster.fingerprint import group_of

    def group(**options: Any) -> str:
        with LLM(MODEL, **{**OPTIONS, **options}) as llm:
            return group_of(llm, PatchEncoder(llm.model.spec.hidden_size))

    first = group()
    assert group(row_budget=32, cache_positions=2048) == first
    assert len({first, group(dtype="int8"), group(cache="int8")}) == 3


def test_a_probe_neither_uses_nor_removes_stored_blocks() -> None:
    from anydecode.cluster.fingerprint import probe

    calls: list[str] = []

    class Recorded(MemorySpill):
        def __contains__(self, key: bytes) -> bool:
            calls.append("contains")
            return super().__contains__(key)

        def put(self, key: bytes, block: bytes) -> None:
            calls.append("put")

        def get(self, key: bytes) -> bytes | None:
            calls.append("get")
            return None

        def clear(self) -> None:
            calls.append("clear")

    with LLM(MODEL, **OPTIONS) as llm:
        expected = probe(llm)
        prefixes = llm.engine.runners["target"].prefixes
        prefixes.spill = spill = Recorded(1 << 20)
        assert probe(llm) == expected and prefixes.spill is spill
        assert not calls
        llm.generate(PROMPT, max_tokens=1)
        assert calls


def test_kernels_of_another_build_are_another_group_although_the_probe_is_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anydecode.cluster.fingerprint import group_of, probe

    library = load_library()
    if library is None:
        pytest.skip("needs the native kernels")
    with LLM(MODEL, **OPTIONS) as llm:
        encoder = PatchEncoder(llm.model.spec.hidden_size)
        group, computed = group_of(llm, encoder), probe(llm)
        monkeypatch.setattr(library, "build", "that of another compiler")
        assert group_of(llm, encoder) != group
        assert probe(llm) == computed
        monkeypatch.undo()
        monkeypatch.setattr(library, "variant", "another variant")
        assert group_of(llm, encoder) != group


def test_the_probe_finds_other_bits_behind_equal_facts() -> None:
    from anydecode.cluster.fingerprint import facts, probe

    with scripted_llm(seed=1) as one, scripted_llm(seed=2) as other:
        encoder = PatchEncoder(one.model.spec.hidden_size)
        assert facts(one, encoder) == facts(other, encoder)
        assert probe(one) != probe(other)
        assert probe(one) == probe(one)


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(SCHEMA, max_string=3, engine="llguidance"),
        Regex("a+"),
        Choice(["a", "b"]),
        Grammar('start: "a"'),
        AfterReasoning(Regex("a+"), "<think>", "</think>", True),
        ToolCalls({"f": JsonSchema(SCHEMA)}, TOOL_FORMATS["hermes"], is_required=True),
    ],
    ids=lambda one: type(one).__name__,
)
def test_constraints_are_the_same_after_a_message(alone: LLM, constraint: Any) -> None:
    request = alone.request("a", constraint=constraint)
    read = from_message(to_message(request, {"constraint": constraint}))["constraint"]
    assert type(read) is type(constraint)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 1}
    expected, found = (alone.generate("a", constraint=one, **options) for one in (constraint, read))
    assert results(found) == results(expected)


def test_a_table_of_banned_words_passes_in_a_message(alone: LLM) -> None:
    words = BannedWordTable([[97], [98, 99]])
    message = to_message(alone.request("a", banned_words=words), {"banned_words": words})
    assert BannedWordTable(json.loads(json.dumps(message))["banned_words"]) == words


def test_workers_name_themselves() -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        frame = Worker(llm, SECRET).join_frame("x", ("h", 1))
    assert (frame["name"], frame["pid"]) == (f"worker-{os.getpid()}", os.getpid())


def test_the_server_shows_the_workers(fleet: FleetLLM, workers: list[LLM]) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    httpx = pytest.importorskip("httpx")
    from anydecode.server.running import LiveServer
    from anydecode.server.settings import Settings

    fleet.generate(PROMPT, max_tokens=4)
    with LiveServer(fleet, Settings(name="m", port=0)) as server:
        live = httpx.get(f"{server.url}/live").json()["fleet"]
    assert {one["role"] for one in live["workers"]} == {"prefill", "decode"}
    assert live["counts"] == fleet.status()["counts"] and live["waiting"] == live["running"] == 0

"""Closed-loop users: every task is answered once, answers are validated, servers are compared."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from anydecode.benchmarks.serving.replay import Endpoint, RequestOutcome  # noqa: E402
from anydecode.benchmarks.serving.users import (  # noqa: E402
    SCHEMAS,
    Task,
    make_task,
    results_of,
    run_users,
)
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.cli.bench import run_bench  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

#: A server that answers every request after a delay with the fields that its schema requires, or
#: with an empty object.
SERVER = """
import asyncio, json, sys
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
import uvicorn
app = FastAPI()
VALUES = {"string": "x", "array": [], "integer": 1, "boolean": True}

@app.get("/health")
def health():
    return {}

@app.get("/v1/models")
def models():
    return {"data": [{"id": "m"}]}

@app.post("/v1/chat/completions")
async def chat(request: Request):
    body = await request.json()
    async def events():
        await asyncio.sleep(float(sys.argv[2]))
        delta = {"content": "a text"}
        tools = body.get("tools")
        if tools or body.get("response_format"):
            schema = (tools[0]["function"]["parameters"] if tools
                      else body["response_format"]["json_schema"]["schema"])
            values = {name: VALUES[one["type"]] if "type" in one else one["enum"][0]
                      for name, one in schema["properties"].items()}
            text = json.dumps(values if sys.argv[3] == "right" else {})
            call = {"index": 0, "function": {"name": "f", "arguments": text}}
            delta = {"tool_calls": [call]} if tools else {"content": text}
        choice = {"delta": delta, "finish_reason": "stop"}
        yield "data: " + json.dumps({"choices": [choice]}) + "\\n\\n"
        yield "data: " + json.dumps({"usage": {"completion_tokens": 7}}) + "\\n\\n"
        yield "data: [DONE]\\n\\n"
    return StreamingResponse(events(), media_type="text/event-stream")

uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


@pytest.mark.slow
def test_servers_are_compared_and_answers_validated(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    out = tmp_path / "out.json"
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {{port}}"
    run_bench("users", [
        "--start", f"quick={command} 0.0 right", "--start", f"slow={command} 0.2 wrong",
        "--users", "1", "--users", "3", "--requests", "6", "--rounds", "1", "--json", str(out),
    ])  # fmt: skip
    report = json.loads(out.read_text())
    assert list(report["servers"]) == ["quick", "slow"]
    for count in ("1", "3"):
        quick, slow = (report["servers"][name][count] for name in ("quick", "slow"))
        assert quick["requests"] == slow["requests"] == 6 and quick["failed"] == 0
        assert quick["tokens"] == 42
        assert (quick["typed"], quick["invalid"], slow["invalid"]) == (4, 0, 4)
        assert quick["ratio"] == 1 and slow["ratio"] > 1
    alone, together = (report["servers"]["slow"][count] for count in ("1", "3"))
    assert together["requests_per_second"][0] > alone["requests_per_second"][0]


@pytest.mark.parametrize("users", [1, 2, 9])
def test_each_task_is_answered_once_by_so_many_users(users: int) -> None:
    tasks = [make_task("text", i, f"question {i}", 4) for i in range(5)]
    sent: list[str] = []
    with scripted_llm() as llm, LiveServer(llm, Settings(name="m", port=0)) as server:
        endpoint = Endpoint("one", f"{server.url}/v1", "m", extra={"ignore_eos": True})
        _, outcomes = asyncio.run(
            run_users(endpoint, tasks, users, 60, lambda: sent.append("done"))
        )
    assert len(sent) == 5
    assert [one.error for one in outcomes] == [None] * 5
    assert [one.tokens for one in outcomes] == [4] * 5


@pytest.mark.parametrize(
    ("text", "valid"),
    [('{"title": "t", "keywords": [], "language": "German"}', True),
     ('{"title": "t", "keywords": [], "language": "Greek"}', False),
     ('{"title": "t", "keyw', False), ("", False)],
)  # fmt: skip
def test_cut_off_and_wrong_answers_are_invalid(text: str, valid: bool) -> None:
    task = make_task("schema", 0, "q", 9)
    assert task.schema is SCHEMAS["summary"]
    outcome = RequestOutcome(0.0, 3, first=0.1, seconds=0.2, tokens=9, text=text)
    results = results_of([(2.0, [task], [outcome])])
    assert results["invalid"] == (not valid)
    assert results["requests_per_second"] == [0.5] and results["tokens_per_second"] == 4.5


def test_failed_requests_are_not_counted_as_answered() -> None:
    outcomes = [RequestOutcome(0.0, 3, error="500"), RequestOutcome(0.0, 3, seconds=1.0, tokens=2)]
    results = results_of([(1.0, [Task("text", {})] * 2, outcomes)])
    assert (results["failed"], results["errors"], results["tokens"]) == (1, ["500"], 2)
    assert results["requests_per_second"] == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--kind", "image"], "--kind is 'image'; allowed are text, schema, tool"),
     (["--start", "a=x {port}"], "two servers have the same name")],
)  # fmt: skip
def test_invalid_options_are_refused(options: list[str], message: str) -> None:
    arguments: list[Any] = ["--start", "a=x {port}", *options]
    with pytest.raises(InvalidRequestError, match=message):
        run_bench("users", arguments)

"""Several servers under one trace: their forms are found out, rounds interleaved, ratios right."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.cli.bench import run_bench  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.evaluation.certify import scripted_llm  # noqa: E402
from anydecode.evaluation.serving import peers  # noqa: E402
from anydecode.evaluation.serving.peers import Comparison, Endpoint, parse_peer, started  # noqa: E402
from anydecode.evaluation.serving.replay import Objective, Outcome  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

#: A server that knows conversations only, and no field beyond the common ones.
STRICT = """
import sys
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
import json, uvicorn
app = FastAPI()

@app.get("/v1/models")
def models():
    return {"data": [{"id": "strict"}]}

@app.post("/v1/chat/completions")
async def chat(request: Request):
    body = await request.json()
    if set(body) - {"model", "messages", "max_tokens", "temperature", "stream"}:
        return JSONResponse({"error": "unexpected"}, 422)
    def said():
        for word in "a b c".split():
            yield "data: " + json.dumps({"choices": [{"delta": {"content": word}}]}) + "\\n\\n"
        yield "data: [DONE]\\n\\n"
    return StreamingResponse(said(), media_type="text/event-stream")

uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


def test_two_servers_in_one_run(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "m.jsonl"
    rows = [{"timestamp": 50 * i, "input_length": 20, "output_length": 5} for i in range(6)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "strict.py").write_text(STRICT)
    with scripted_llm() as llm, LiveServer(llm, Settings(name="ours", port=0)) as server:
        run_bench(
            "serving",
            [
                "--trace", str(trace), "--url", f"{server.url}/v1", "--model", "ours",
                "--peer", f"again={server.url}/v1", "--rounds", "2", "--requests", "6",
                "--rate", "60", "--slo", "ttft=30,tpot=30",
                "--json", str(tmp_path / "two.json"), "--plot", str(tmp_path / "two.svg"),
            ],
        )  # fmt: skip
        report = json.loads((tmp_path / "two.json").read_text())["servers"]
        assert set(report) == {"anydecode", "again"}
        for figures in report.values():
            assert (figures["requests"], figures["failed"], figures["tokens"]) == (12, 0, 60)
            assert figures["api"] == "completions" and figures["ignores_eos"]
            assert len(figures["goodput_per_round"]) == 2
        assert "times as much" in capsys.readouterr().out
        picture = (tmp_path / "two.svg").read_text()
        assert picture.count("<svg") == 4 and picture.count("<polyline") == 6
        command = f"{sys.executable} {tmp_path / 'strict.py'} {{port}}"
        with started("strict", command) as url:
            found = asyncio.run(
                peers.prepared([Endpoint("ours", f"{server.url}/v1"), Endpoint("strict", url)])
            )
        assert [(one.model, one.chat, sorted(one.extra)) for one in found] == [
            ("ours", True, ["ignore_eos", "stream_options"]), ("strict", True, []),
        ]  # fmt: skip


def test_ratios_by_hand() -> None:
    def outcomes(seconds: float, late: int) -> list[Outcome]:
        good = [Outcome(0.0, 5, first=0.1, seconds=seconds, tokens=3) for _ in range(4 - late)]
        return good + [Outcome(0.0, 5, first=9.0, seconds=seconds, tokens=3)] * late

    rounds = {"a": [outcomes(2.0, 0), outcomes(4.0, 0)], "b": [outcomes(2.0, 2), outcomes(8.0, 3)]}
    comparison = Comparison([Endpoint("a", "x"), Endpoint("b", "y", chat=True)], rounds)
    told = comparison.report(Objective(1.0, 10.0))
    assert told["a"]["goodput_per_round"] == [2.0, 1.0]
    assert told["b"]["goodput_per_round"] == [1.0, 0.125]
    assert told["a"]["ratio"] == 1.0 and told["b"]["ratio"] == (2.0 + 8.0) / 2
    assert told["b"]["attainment"] == 3 / 8 and told["b"]["api"] == "chat"


def test_what_is_no_peer_is_told() -> None:
    assert parse_peer("a=b=c", "--peer") == ("a", "b=c")
    for text in ("a", "=b", "a="):
        with pytest.raises(InvalidRequestError, match="--peer wants NAME=VALUE"):
            parse_peer(text, "--peer")
    with pytest.raises(InvalidRequestError, match="ended with exit code 3"):
        with started("short", f'{sys.executable} -c "raise SystemExit(3)"'):
            pass
    with pytest.raises(InvalidRequestError, match="cannot be started"):
        with started("none", "/nowhere/server {port}"):
            pass
    with pytest.raises(InvalidRequestError, match="does not tell its models"):
        asyncio.run(peers.prepared([Endpoint("gone", "http://127.0.0.1:9/v1")]))

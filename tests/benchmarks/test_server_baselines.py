"""Several servers under one trace: detection of their APIs, interleaved rounds, ratios,
overhead."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.benchmarks.serving import baselines  # noqa: E402
from anydecode.benchmarks.serving import overhead as overhead_bench  # noqa: E402
from anydecode.benchmarks.serving.baselines import Comparison, Load, parse_baseline, started_server  # noqa: E402
from anydecode.benchmarks.serving.plot import draw_distributions, draw_sweep  # noqa: E402
from anydecode.benchmarks.serving.replay import Endpoint, Objective, RequestOutcome  # noqa: E402
from anydecode.benchmarks.serving.sweep import Search, print_sweep, sweep  # noqa: E402
from anydecode.benchmarks.serving.traces import Arrival, prompt_text  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.cli.bench import run_bench  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server import chat  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.service import Service  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

#: A server that supports only chat completions, and no optional fields.
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
    def events():
        for word in "a b c".split():
            yield "data: " + json.dumps({"choices": [{"delta": {"content": word}}]}) + "\\n\\n"
        yield "data: [DONE]\\n\\n"
    return StreamingResponse(events(), media_type="text/event-stream")

uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""

#: A server that first returns 503 and then refuses every request.
REFUSING = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    loading = 2
    def answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        Handler.loading -= 1
        if Handler.loading >= 0:
            return self.answer(503, b"loading")
        self.answer(200, b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(400, b"too long")
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_two_servers_are_compared_in_one_run(
    tmp_path: Path, capsys: Any, figures: list[Any]
) -> None:
    trace = tmp_path / "m.jsonl"
    rows = [{"timestamp": 50 * i, "input_length": 20, "output_length": 5} for i in range(6)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "strict.py").write_text(STRICT)
    with scripted_llm() as llm, LiveServer(llm, Settings(name="ours", port=0)) as server:
        run_bench(
            "serving",
            [
                "--trace", str(trace), "--url", f"{server.url}/v1", "--model", "ours",
                "--baseline", f"again={server.url}/v1", "--rounds", "2", "--requests", "6",
                "--rate", "60", "--slo", "ttft=30,tpot=30",
                "--json", str(tmp_path / "two.json"), "--plot", str(tmp_path / "two.svg"),
            ],
        )  # fmt: skip
        report = json.loads((tmp_path / "two.json").read_text())["servers"]
        assert set(report) == {"anydecode", "again"}
        for results in report.values():
            assert (results["requests"], results["failed"], results["tokens"]) == (12, 0, 60)
            assert results["api"] == "completions" and results["ignores_eos"]
            assert len(results["goodput_per_round"]) == 2
        output = capsys.readouterr()
        assert "times as much" in output.out
        for count in (0, 6):
            steps = [line for line in output.err.splitlines() if f"{count} of 6 requests" in line]
            assert [line.rpartition(", ")[0] for line in steps] == [
                f"{count} of 6 requests: {name}, round {number}, 60/s"
                for name, number in (("anydecode", 1), ("again", 1), ("again", 2), ("anydecode", 2))
            ]
        lines = [line.partition(":")[0] for line in output.err.splitlines() if " of " not in line]
        assert lines[:2] == ["warming up anydecode", "warming up again"]
        assert lines[2:] == ["anydecode, round 1, 60/s", "again, round 1, 60/s",
                         "again, round 2, 60/s", "anydecode, round 2, 60/s"]  # fmt: skip
        (figure,) = figures
        assert [len(panel.lines) for panel in figure.axes] == [3, 3, 2]  # two and the objective
        command = f"{sys.executable} {tmp_path / 'strict.py'} {{port}}"
        with started_server("strict", command) as url:
            endpoints = asyncio.run(
                baselines.prepare([Endpoint("ours", f"{server.url}/v1"), Endpoint("strict", url)])
            )
        assert [(one.model, one.chat, sorted(one.extra)) for one in endpoints] == [
            ("ours", True, ["stream_options"]), ("strict", True, []),
        ]  # fmt: skip
        alone = asyncio.run(baselines.prepare([Endpoint("ours", f"{server.url}/v1")]))
        assert sorted(alone[0].extra) == ["ignore_eos", "stream_options"]


def test_ratios_match_a_hand_computation() -> None:
    def outcomes(seconds: float, late: int) -> list[RequestOutcome]:
        good = [
            RequestOutcome(0.0, 5, first=0.1, seconds=seconds, tokens=3) for _ in range(4 - late)
        ]
        return good + [RequestOutcome(0.0, 5, first=9.0, seconds=seconds, tokens=3)] * late

    rounds = {"a": [outcomes(2.0, 0), outcomes(4.0, 0)], "b": [outcomes(2.0, 2), outcomes(8.0, 3)]}
    comparison = Comparison([Endpoint("a", "x"), Endpoint("b", "y", chat=True)], rounds)
    report = comparison.report(Objective(1.0, 10.0))
    assert report["a"]["goodput_per_round"] == [2.0, 1.0]
    assert report["b"]["goodput_per_round"] == [1.0, 0.125]
    assert report["a"]["ratio"] == 1.0 and report["b"]["ratio"] == (2.0 + 8.0) / 2
    assert report["b"]["attainment"] == 3 / 8 and report["b"]["api"] == "chat"


@pytest.mark.parametrize("mistaken", [False, True])
def test_goodput_is_found_by_bisection(mistaken: bool, capsys: Any, monkeypatch: Any) -> None:
    """Servers that meet the objective up to 3 and 1 requests per second, and one that never does.
    The mistake: the search accepts the first rate."""
    limits = {"fast": 3.0, "slow": 1.0, "never": 0.0}
    rates_tried: list[tuple[str, float, int]] = []

    def run(self: Load, endpoint: Endpoint, rate: float, number: int) -> list[RequestOutcome]:
        rates_tried.append((endpoint.name, rate, number))
        good = 9 if rate <= limits[endpoint.name] else 8
        return [
            RequestOutcome(0.0, 5, first=0.1 if n < good else 9.0, seconds=9.0) for n in range(10)
        ]

    monkeypatch.setattr(Load, "run", run)
    if mistaken:
        monkeypatch.setattr(Search, "goodput", property(lambda self: self.rates[self.high - 1]))
        monkeypatch.setattr(Search, "record", lambda self, is_met: setattr(self, "low", self.high))
    load = Load(lambda rate: [], 1.0, Objective(1.0, 1.0))
    rates = [4.0, 0.5, 1.0, 2.0, 0.25, 3.0, 6.0]
    results = sweep([Endpoint(name, "x") for name in limits], load, rates, 0.9, 2)
    good = {name: server["goodput_per_round"] for name, server in results.items()}
    right = {"fast": [3.0, 3.0], "slow": [1.0, 1.0], "never": [0.0, 0.0]}
    assert (good == right) != mistaken
    if mistaken:
        return
    assert results["slow"]["ratio"] == 3.0 and results["never"]["ratio"] is None
    assert [(one["rate"], one["round"]) for one in results["fast"]["runs"][:3]] == [
        (2.0, 1), (4.0, 1), (3.0, 1),
    ]  # fmt: skip
    assert [name for name, _, _ in rates_tried[:3]] == ["fast", "slow", "never"] and len(
        rates_tried
    ) == 18
    print_sweep(results, rates, 0.9)
    out = capsys.readouterr().out
    assert "slow: goodput 1 requests/s; fast's is 3.00 times as much" in out
    assert "never: goodput below 0.25 requests/s" in out and "90%" in out


def test_a_sweep_against_a_server(tmp_path: Path, capsys: Any, figures: list[Any]) -> None:
    trace = tmp_path / "m.jsonl"
    row = {"input_length": 20, "output_length": 5, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({"timestamp": 50 * i, **row}) + "\n" for i in range(4)))
    with scripted_llm() as llm, LiveServer(llm, Settings(name="ours", port=0)) as server:
        options = [
            "--trace", str(trace), "--url", f"{server.url}/v1", "--model", "ours", "--requests",
            "4", "--rate", "40", "--rate", "80", "--slo", "ttft=30",
        ]  # fmt: skip
        run_bench("serving", [*options, "--json", "-"])
        report = json.loads(capsys.readouterr().out)
        ours = report["servers"]["anydecode"]
        assert ours["goodput_per_round"] == [80.0] and report["rates"] == [40.0, 80.0]
        assert [run["rate"] for run in ours["runs"]] == [40.0, 80.0]
        run_bench("serving", options)
        assert "goodput 80 requests/s or more" in capsys.readouterr().out
        run_bench("serving", [*options, "--plot", str(tmp_path / "x.svg")])
        (figure,) = figures
        assert [len(panel.lines) for panel in figure.axes] == [2, 3, 2]


def test_the_sweep_plot_has_medians_over_rounds(tmp_path: Path, figures: list[Any]) -> None:
    """The middle rate was tried in two rounds; a rate without answers has no latencies."""

    def run(rate: float, attainment: float, first: float | None) -> dict[str, Any]:
        times = {"p50": first, "p99": None if first is None else 10 * first}
        return {"rate": rate, "attainment": attainment, "ttft": times, "tpot": times}

    runs = [run(0.1, 1.0, 0.1), run(1.0, 0.8, 1.0), run(1.0, 0.6, 1.0), run(10.0, 0.0, None)]
    draw_sweep(tmp_path / "x.png", "t$1", {"a": {"runs": runs}}, Objective(2.0, math.inf), 0.9)
    (figure,) = figures
    shares, firsts, tokens = (
        [line.get_xydata().tolist() for line in panel.lines] for panel in figure.axes
    )
    assert shares[1] == [[0.1, 1.0], [1.0, 0.7], [10.0, 0.0]] and shares[0][0][1] == 0.9
    assert firsts[0][0][1] == 2.0  # the objective; time per token has none
    assert firsts[1:] == tokens == [[[0.1, 0.1], [1.0, 1.0]], [[0.1, 1.0], [1.0, 10.0]]]
    labels = [text.get_text() for text in figure.axes[2].get_xticklabels()]
    assert labels == ["0.1/s", "1/s", "10/s"]


def test_distributions_leave_out_a_server_without_values(
    tmp_path: Path, figures: list[Any]
) -> None:
    panels = {"first": {"a": [0.2, 0.1], "b": [1.0], "absent": []}, "gaps": {"b": [0.0]}}
    draw_distributions(tmp_path / "x.png", "t", panels, {"first": 0.5})
    (figure,) = figures
    first, gaps = figure.axes
    assert first.lines[0].get_xdata()[-2:].tolist() == [0.1, 0.2] and len(first.lines) == 3
    assert len(gaps.lines) == 1 and gaps.lines[0].get_xdata()[-1] > 0  # zero has no logarithm
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["a", "b"]
    assert gaps.lines[0].get_color() == first.lines[1].get_color()  # b


@pytest.mark.parametrize("mistaken", [False, True])
def test_sigterm_stops_started_servers(mistaken: bool, tmp_path: Path) -> None:
    """The mistake: the signal is not handled."""
    ending = "import os, threading; threading.Timer(30, os._exit, [0]).start()\n"
    server = tmp_path / "refusing.py"
    server.write_text(ending + REFUSING)
    program = f"""
import contextlib, signal
from anydecode.benchmarks.serving.baselines import sigterm_as_exit, started_server
with {"contextlib.nullcontext" if mistaken else "sigterm_as_exit"}():
    with started_server("refusing", "{sys.executable} {server} {{port}}") as url:
        print(url, flush=True)
        signal.pause()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        port = int(bench.stdout.readline().rpartition(":")[2].partition("/")[0])
        bench.terminate()
        code = bench.wait(60)
    assert code == (-signal.SIGTERM if mistaken else 128 + signal.SIGTERM)
    with socket.socket() as probe:
        alive = probe.connect_ex(("127.0.0.1", port)) == 0
    assert alive == mistaken


@pytest.mark.parametrize("mistaken", [False, True])
def test_runs_share_no_prompts(mistaken: bool, monkeypatch: Any) -> None:
    """Warm-up, rounds and rates use different words; all servers get the same ones. The mistake:
    one salt for all."""
    sent: list[tuple[str, ...]] = []

    async def replay(
        endpoint: Endpoint, arrivals: list[Arrival], **options: Any
    ) -> list[RequestOutcome]:
        salt = "" if mistaken else options.get("salt", "")
        sent.append((endpoint.name, *(prompt_text(one, n, salt) for n, one in enumerate(arrivals))))
        return [RequestOutcome(0.0, 5, first=0.1, seconds=0.1) for _ in arrivals]

    monkeypatch.setattr(baselines, "replay", replay)
    load = Load(lambda rate: [Arrival(0.0, 40, 5, (1, 2), 20)] * 4, 1.0, Objective(1.0, 1.0))
    both = load.prepare_endpoints([Endpoint("a", "x", "m"), Endpoint("b", "y", "m")])
    baselines.compare(both, load, 1.0, 2)
    load.run(both[0], 2.0, 0)
    texts = {name: [text for one, *text in sent if one == name] for name in "ab"}
    assert texts["a"][:-1] == texts["b"]
    firsts = [text[0] for text in texts["a"]]
    assert (len(set(firsts)) == len(firsts)) != mistaken


def test_a_failing_server_is_a_one_line_error() -> None:
    def command(body: str) -> str:
        return f"{sys.executable} -c {shlex.quote(body)} {{port}}"

    with (
        pytest.raises(InvalidRequestError, match="^x ended with exit code 3: no such model$"),
        started_server("x", command("import sys; print('no such model'); sys.exit(3)")),
    ):
        pass
    with (
        pytest.raises(InvalidRequestError, match="^x did not answer within 0.3 s: loading$"),
        started_server(
            "x", command("import time; print('loading', flush=True); time.sleep(9)"), 0.3
        ),
    ):
        pass
    load = Load(lambda rate: [Arrival(0.0, 5, 2)] * 2, 9.0, Objective(1.0, 1.0))
    with started_server("x", command(REFUSING)) as url:
        with pytest.raises(InvalidRequestError, match="^x answered no request: 400: too long"):
            load.prepare_endpoints([Endpoint("x", url)])
        with pytest.raises(InvalidRequestError, match=r"^x, round 1, 2/s: every request failed: 4"):
            load.run(Endpoint("x", url, "m"), 2.0, 0)


@pytest.mark.parametrize(
    "slow",
    ["request", *(pytest.param(name, marks=pytest.mark.slow) for name in ("", "token"))],
)
def test_overhead_measures_server_time(slow: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The overhead of a server that sleeps before each response is measured, and that of one that
    works on each chunk."""
    head, compact = Service.head, chat.compact

    def slow_head(self: Service, *named: str) -> dict[str, Any]:
        time.sleep(0.2)
        return head(self, *named)

    def slow_compact(value: Any) -> str:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return compact(value)

    if slow == "request":
        monkeypatch.setattr(Service, "head", slow_head)
    if slow == "token":
        monkeypatch.setattr(chat, "compact", slow_compact)
    # On a busy machine the event loop waits: passes of 20 ms do not all end meanwhile.
    monkeypatch.setattr(overhead_bench._PacedModel, "pause", 0.02)
    out = tmp_path / "out.json"
    options = ["--requests", "2", "--tokens", "12", "--rounds", "1", "--json", str(out)]
    run_bench("overhead", options)
    overhead = json.loads(out.read_text())
    assert (overhead["request"] > 0.19) == (slow == "request")
    if slow != "request":  # otherwise all tokens are ready before the first chunk is sent
        assert 0 < overhead["pieces"] <= 1
        # Half of the 10 ms that a slow chunk takes: other chunks take a tenth of a millisecond.
        assert (overhead["token_cpu"] > 0.005 * overhead["pieces"]) == (slow == "token")


def test_invalid_baselines_are_refused() -> None:
    assert parse_baseline("a=b=c", "--baseline") == ("a", "b=c")
    for text in ("a", "=b", "a="):
        with pytest.raises(InvalidRequestError, match="--baseline is .*; give NAME=VALUE"):
            parse_baseline(text, "--baseline")
    with pytest.raises(InvalidRequestError, match="cannot be started"):
        with started_server("none", "/nowhere/server {port}"):
            pass
    with pytest.raises(InvalidRequestError, match="does not list its models"):
        asyncio.run(baselines.prepare([Endpoint("gone", "http://127.0.0.1:9/v1")]))

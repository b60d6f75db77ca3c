"""`anydecode bench serving`: a real trace, scaled to the machine, against any OpenAI-compatible
endpoint."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.errors import InvalidRequestError
from anydecode.evaluation.machine import cpu_name, usable_cores
from anydecode.evaluation.serving.peers import (
    Comparison,
    Endpoint,
    compare,
    parse_peer,
    started,
)
from anydecode.evaluation.serving.plot import distribution_svg
from anydecode.evaluation.serving.replay import Objective, Outcome, replay, summary
from anydecode.evaluation.serving.traces import fitted, read_trace


def parse_objective(text: str) -> Objective:
    """`ttft=0.5,tpot=0.05` in seconds; a limit that is not named is not set."""
    found = {"ttft": float("inf"), "tpot": float("inf")}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise InvalidRequestError(f"--slo: {part!r} is no limit in seconds") from None
    if set(found) != {"ttft", "tpot"} or min(found.values()) <= 0:
        raise InvalidRequestError("--slo takes ttft=SECONDS and tpot=SECONDS, above 0")
    return Objective(**found)


def bench_serving(
    trace: Annotated[Path, typer.Option("--trace", exists=True, dir_okay=False, help="The trace.")],
    url: Annotated[str, typer.Option("--url", help="The endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name there.")] = (
        "smollm2-135m-instruct"
    ),
    slo: Annotated[
        str, typer.Option("--slo", help="What counts as good, in seconds.")
    ] = "ttft=1.0,tpot=0.1",
    requests: Annotated[int, typer.Option("--requests", min=2, help="How many requests.")] = 64,
    rate: Annotated[float, typer.Option("--rate", help="Requests a second on average.")] = 1.0,
    longest: Annotated[
        int, typer.Option("--longest", min=1, help="Most tokens of a prompt.")
    ] = 2048,
    output: Annotated[int, typer.Option("--output", min=1, help="Most tokens of an answer.")] = 128,
    shrink: Annotated[float, typer.Option("--shrink", help="Lengths times this.")] = 1.0,
    decoder: Annotated[
        str | None, typer.Option("--decoder", "-d", help="A decoder of this server.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="ANYDECODE_API_KEY", help="The server's key.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 300.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures here; - for stdout."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write an SVG picture here.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=URL", help="A further server; repeatable."),
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--start",
            metavar="NAME=COMMAND",
            help="One to be started for this run, with {port} in its command; repeatable.",
        ),
    ] = None,
    peer_model: Annotated[
        list[str] | None,
        typer.Option("--peer-model", metavar="NAME=MODEL", help="A model's name there."),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often, where there are several servers.")
    ] = 3,
) -> None:
    """Replay a trace against a server, or several in turn, and tell how its users fared.

    Servers that are started here come first, then peers; without --start the one at --url is
    first. Ratios are the first server's goodput over each other's.

    Example: anydecode bench serving --trace conversation_trace.jsonl --slo ttft=1,tpot=0.1
    """
    objective = parse_objective(slo)
    if rate <= 0 or shrink <= 0:
        raise InvalidRequestError("--rate and --shrink must be above 0")
    arrivals = fitted(
        read_trace(trace),
        requests=requests,
        rate=rate,
        longest=longest,
        output=output,
        shrink=shrink,
    )
    extra = {"decoder": decoder} if decoder else {}
    if peer or start:
        models = dict(parse_peer(text, "--peer-model") for text in peer_model or ())
        with ExitStack() as stack:
            servers = [parse_peer(text, "--start") for text in start or ()]
            urls = [(name, stack.enter_context(started(name, line))) for name, line in servers]
            if not urls:
                urls = [("anydecode", url)]
                models.setdefault("anydecode", model)
            urls += [parse_peer(text, "--peer") for text in peer or ()]
            endpoints = [
                Endpoint(
                    name,
                    at.rstrip("/"),
                    models.get(name, ""),
                    api_key if number == 0 else None,
                    extra=extra if number == 0 else {},
                )
                for number, (name, at) in enumerate(urls)
            ]
            if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
                raise InvalidRequestError("every server needs a name of its own")
            comparison = compare(endpoints, arrivals, rounds, timeout)
        _tell(comparison, objective, trace, rate, rounds, json_file, plot)
        return
    outcomes = asyncio.run(
        replay(url, arrivals, model=model, api_key=api_key, timeout=timeout, extra=extra)
    )
    report: dict[str, Any] = {
        "trace": trace.name,
        "model": model,
        "decoder": decoder,
        "rate": rate,
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        **summary(outcomes, objective),
    }
    if plot is not None:
        plot.write_text(picture(report, outcomes, objective), encoding="utf-8")
    if json_file == Path("-"):
        print(json.dumps(_finite(report)))
        return
    print_report(report)
    if json_file is not None:
        json_file.write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")


def _tell(
    comparison: Comparison,
    objective: Objective,
    trace: Path,
    rate: float,
    rounds: int,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Print and write what a comparison gave."""
    servers = comparison.report(objective)
    report = {
        "trace": trace.name,
        "rate": rate,
        "rounds": rounds,
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "servers": servers,
    }
    if plot is not None:
        title = f"{trace.name}, {rate:g}/s"
        plot.write_text(comparison.picture(title, objective), encoding="utf-8")
    if json_file == Path("-"):
        print(json.dumps(_finite(report)))
        return
    first = comparison.endpoints[0].name
    for name, figures in servers.items():
        print(f"\n{name} ({figures['api']}, {rounds} rounds)")
        print_report(figures)
        if name != first and figures["ratio"] is not None:
            print(f"goodput of {first}: {figures['ratio']:.2f} times as much")
    if json_file is not None:
        json_file.write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")


def picture(report: dict[str, Any], outcomes: list[Outcome], objective: Objective) -> str:
    """The distribution of the three latencies as SVG."""
    curves = {
        "time to first token": [one.first for one in outcomes if one.first is not None],
        "time per token": [one.per_token for one in outcomes if one.per_token is not None],
        "between tokens": [gap for one in outcomes for gap in one.gaps],
    }
    marks = {"ttft": objective.ttft, "tpot": objective.tpot}
    finite = {name: value for name, value in marks.items() if value != float("inf")}
    title = f"{report['trace']}, {report['requests']} requests, {report['rate']:g}/s"
    return distribution_svg(title, curves, finite)


def print_report(report: dict[str, Any]) -> None:
    """The figures, line by line."""
    print(
        f"{report['requests']} requests, {report['failed']} failed, {report['seconds']:.1f} s, "
        f"{report['tokens_per_second']:.1f} tokens/s"
    )
    for name in ("ttft", "tpot", "itl"):
        figures = report[name]
        if figures["p50"] is not None:
            p50, p99 = figures["p50"] * 1e3, figures["p99"] * 1e3
            print(f"{name}  median {p50:.1f} ms, 99th percentile {p99:.1f} ms")
    print(
        f"goodput {report['goodput_requests_per_second']:.3f} requests/s, "
        f"{report['goodput_tokens_per_second']:.1f} tokens/s; "
        f"{report['attainment']:.0%} met the objective"
    )
    for error in report["errors"]:
        print(f"error: {error}")


def _finite(value: Any) -> Any:
    """JSON has no infinity; a limit that is not set becomes null."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if value == float("inf") else value

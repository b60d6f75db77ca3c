"""`anydecode bench serving`: replays a real trace, scaled to the machine, against OpenAI-compatible
servers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.benchmarks.serving.baselines import (
    Load,
    compare,
    parse_baseline,
    sigterm_as_exit,
    started_server,
)
from anydecode.benchmarks.serving.plot import draw_sweep
from anydecode.benchmarks.serving.replay import Endpoint, Objective
from anydecode.benchmarks.serving.sweep import print_sweep, sweep
from anydecode.benchmarks.serving.traces import read_trace, scaled
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import note
from anydecode.report import JsonFile, PlotFile, write_report


def parse_objective(text: str) -> Objective:
    """Parse `ttft=0.5,tpot=0.05`, in seconds; a limit that is not given is infinite. Raises
    `InvalidRequestError`."""
    limits = {"ttft": float("inf"), "tpot": float("inf")}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise InvalidRequestError(
                f"--slo contains {part!r}; give ttft=SECONDS,tpot=SECONDS"
            ) from None
    if set(limits) != {"ttft", "tpot"} or min(limits.values()) <= 0:
        raise InvalidRequestError(f"--slo is {text!r}; give ttft=SECONDS,tpot=SECONDS, above 0")
    return Objective(**limits)


def bench_serving(
    trace: Annotated[
        Path, typer.Option("--trace", exists=True, dir_okay=False, help="The trace file.")
    ],
    url: Annotated[
        str, typer.Option("--url", help="URL of the server's API.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model's name on that server.")
    ] = ("smollm2-135m-instruct"),
    slo: Annotated[
        str, typer.Option("--slo", help="Latency objective, in seconds.")
    ] = "ttft=1.0,tpot=0.1",
    requests: Annotated[int, typer.Option("--requests", min=2, help="Number of requests.")] = 64,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--rate", help="Mean requests per second (1); repeat it to search for the goodput."
        ),
    ] = None,
    attain: Annotated[
        float,
        typer.Option(
            "--attain", help="Share of requests that must meet the objective; with several rates."
        ),
    ] = 0.9,
    longest: Annotated[
        int, typer.Option("--longest", min=1, help="Most tokens of a prompt.")
    ] = 2048,
    output: Annotated[int, typer.Option("--output", min=1, help="Most tokens of an answer.")] = 128,
    shrink: Annotated[float, typer.Option("--shrink", help="Factor on all lengths.")] = 1.0,
    decoder: Annotated[
        str | None, typer.Option("--decoder", "-d", help="Decoder of the first server.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="ANYDECODE_API_KEY", help="API key of the first server."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Timeout of a request, in seconds.")
    ] = 300.0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="NAME=URL", help="Another server; repeatable."),
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--start",
            metavar="NAME=COMMAND",
            help="A server to start for this run, with {port} in its command; repeatable.",
        ),
    ] = None,
    baseline_model: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline-model", metavar="NAME=MODEL", help="The model's name on that server."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Rounds, with several servers.")
    ] = 3,
) -> None:
    """Replay a trace against one server or several, and report latency and goodput.

    Servers of --start come first, then those of --baseline; without --start the server at --url is
    first. Ratios are the first server's goodput over each other server's. With several rates,
    goodput is the largest rate at which --attain of the requests meet the objective.

    Example: anydecode bench serving --trace conversation_trace.jsonl --slo ttft=1,tpot=0.1
    """
    rates = rate or [1.0]
    if min(rates) <= 0 or shrink <= 0:
        raise InvalidRequestError("--rate and --shrink must be above 0")
    if not 0 < attain <= 1:
        raise InvalidRequestError(f"--attain is {attain}; it must be above 0 and at most 1")
    requested = read_trace(trace)
    load = Load(
        lambda scaled_rate: scaled(
            requested,
            requests=requests,
            rate=scaled_rate,
            longest=longest,
            output=output,
            shrink=shrink,
        ),
        timeout,
        parse_objective(slo),
    )
    report: dict[str, Any] = {
        "trace": trace.name,
        "decoder": decoder,
        "rates": rates,
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
    }
    with sigterm_as_exit(), ExitStack() as stack:
        own = Endpoint("anydecode", url.rstrip("/"), model)
        endpoints = load.prepare_endpoints(
            _endpoints(stack, own, start, baseline, baseline_model, api_key, decoder)
        )
        report["rounds"] = rounds if len(endpoints) > 1 else 1
        if len(rates) > 1:
            report["servers"] = sweep(endpoints, load, rates, attain, report["rounds"])
            if plot is not None:
                draw_sweep(plot, trace.name, report["servers"], load.objective, attain)
        else:
            comparison = compare(endpoints, load, rates[0], report["rounds"])
            report["servers"] = comparison.report(load.objective)
            if plot is not None:
                comparison.draw(plot, f"{trace.name}, {rates[0]:g}/s", load.objective)

    def show() -> None:
        if len(rates) > 1:
            print_sweep(report["servers"], rates, attain)
        else:
            print_comparison(report["servers"], report["rounds"])

    write_report(_finite(report), json_file, show)


def _endpoints(
    stack: ExitStack,
    own: Endpoint,
    start: list[str] | None,
    baseline: list[str] | None,
    baseline_model: list[str] | None,
    api_key: str | None,
    decoder: str | None,
) -> list[Endpoint]:
    """The endpoints of a run: servers to start (which `stack` stops), or else `own`; then those of
    --baseline. API key and decoder apply to the first."""
    models = dict(parse_baseline(text, "--baseline-model") for text in baseline_model or ())
    commands = [parse_baseline(text, "--start") for text in start or ()]
    others = [parse_baseline(text, "--baseline") for text in baseline or ()]
    names = [name for name, _ in [*(commands or [(own.name, "")]), *others]]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two servers have the same name; give each a different one")
    if unknown := set(models) - set(names):
        raise InvalidRequestError(
            f"--baseline-model names unknown servers: {', '.join(sorted(unknown))}"
        )
    endpoints = [] if commands else [own]
    for name, command in commands:
        note(f"starting {name}")
        endpoints.append(Endpoint(name, stack.enter_context(started_server(name, command))))
    endpoints += [Endpoint(name, url.rstrip("/")) for name, url in others]
    named = [replace(one, model=models.get(one.name, one.model)) for one in endpoints]
    extra = {"decoder": decoder} if decoder else {}
    return [replace(named[0], api_key=api_key, extra=extra), *named[1:]]


def print_comparison(servers: dict[str, Any], rounds: int) -> None:
    """Print the results of every server, and the ratio of the first one's goodput to its own."""
    first = next(iter(servers))
    for name, results in servers.items():
        print(f"\n{name} ({results['api']}, {rounds} rounds)")
        print_report(results)
        if name != first and results["ratio"] is not None:
            print(f"goodput of {first}: {results['ratio']:.2f} times as much")


def print_report(report: dict[str, Any]) -> None:
    """Print the results of one server."""
    print(
        f"{report['requests']} requests, {report['failed']} failed, {report['seconds']:.1f} s, "
        f"{report['prompt_tokens']} prompt tokens, {report['tokens']} generated tokens, "
        f"{report['tokens_per_second']:.1f} tokens/s"
    )
    for name in ("ttft", "tpot", "itl", "itl_beside_prompts"):
        results = report[name]
        if results["p50"] is not None:
            p50, p99 = results["p50"] * 1e3, results["p99"] * 1e3
            print(f"{name.replace('_', ' ')}  median {p50:.1f} ms, 99th percentile {p99:.1f} ms")
    print(
        f"goodput {report['goodput_requests_per_second']:.3f} requests/s, "
        f"{report['goodput_tokens_per_second']:.1f} tokens/s; "
        f"{report['attainment']:.0%} met the objective"
    )
    for error in report["errors"]:
        print(f"error: {error}")


def _finite(value: Any) -> Any:
    """`value` with infinity, which JSON cannot represent, replaced by None."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if value == float("inf") else value

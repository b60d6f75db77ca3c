"""`anydecode bench serving`: a real trace, scaled to the machine, against any OpenAI-compatible
endpoint."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.errors import InvalidRequestError
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.evaluation.report import JsonFile, write_report
from anydecode.evaluation.serving.baselines import (
    Load,
    compare,
    ended_by_sigterm,
    parse_baseline,
    started,
)
from anydecode.evaluation.serving.replay import Endpoint, Objective
from anydecode.evaluation.serving.sweep import print_sweep, sweep
from anydecode.evaluation.serving.sweep_plot import sweep_svg
from anydecode.evaluation.serving.traces import fitted, read_trace
from anydecode.evaluation.speculative_report import note


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
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", help="Requests a second on average (1); several: find the best."),
    ] = None,
    attain: Annotated[
        float,
        typer.Option("--attain", help="Share of requests a rate must satisfy; with several rates."),
    ] = 0.9,
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
    json_file: JsonFile = None,
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
    first. Ratios are the first server's goodput over each other's. With several rates goodput is
    the largest of them at which --attain of the requests meet the objective.

    Example: anydecode bench serving --trace conversation_trace.jsonl --slo ttft=1,tpot=0.1
    """
    rates = rate or [1.0]
    if min(rates) <= 0 or shrink <= 0:
        raise InvalidRequestError("--rate and --shrink must be above 0")
    if not 0 < attain <= 1:
        raise InvalidRequestError("--attain is a share above 0, at most 1")
    requested = read_trace(trace)
    load = Load(
        lambda pace: fitted(
            requested, requests=requests, rate=pace, longest=longest, output=output, shrink=shrink
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
    with ended_by_sigterm(), ExitStack() as stack:
        ours = Endpoint("anydecode", url.rstrip("/"), model)
        endpoints = load.ready(_endpoints(stack, ours, start, peer, peer_model, api_key, decoder))
        report["rounds"] = rounds if len(endpoints) > 1 else 1
        if len(rates) > 1:
            report["servers"] = sweep(endpoints, load, rates, attain, report["rounds"])
            picture = sweep_svg(trace.name, report["servers"], rates, load.objective, attain)
        else:
            comparison = compare(endpoints, load, rates[0], report["rounds"])
            report["servers"] = comparison.report(load.objective)
            title = f"{trace.name}, {rates[0]:g}/s"
            picture = comparison.picture(title, load.objective)
    if plot is not None:
        plot.write_text(picture, encoding="utf-8")

    def show() -> None:
        if len(rates) > 1:
            print_sweep(report["servers"], rates, attain)
        else:
            print_comparison(report["servers"], report["rounds"])

    write_report(_finite(report), json_file, show)


def _endpoints(
    stack: ExitStack,
    ours: Endpoint,
    start: list[str] | None,
    peer: list[str] | None,
    peer_model: list[str] | None,
    api_key: str | None,
    decoder: str | None,
) -> list[Endpoint]:
    """The servers of a run: those to be started (until `stack` ends), or `ours`; then peers. Key
    and decoder are the first's."""
    models = dict(parse_baseline(text, "--peer-model") for text in peer_model or ())
    commands = [parse_baseline(text, "--start") for text in start or ()]
    peers = [parse_baseline(text, "--peer") for text in peer or ()]
    names = [name for name, _ in [*(commands or [(ours.name, "")]), *peers]]
    if len(set(names)) < len(names):
        raise InvalidRequestError("every server needs a name of its own")
    if unknown := set(models) - set(names):
        raise InvalidRequestError(f"--peer-model names no server: {', '.join(sorted(unknown))}")
    found = [] if commands else [ours]
    for name, command in commands:
        note(f"starting {name}")
        found.append(Endpoint(name, stack.enter_context(started(name, command))))
    found += [Endpoint(name, at.rstrip("/")) for name, at in peers]
    named = [replace(one, model=models.get(one.name, one.model)) for one in found]
    extra = {"decoder": decoder} if decoder else {}
    return [replace(named[0], api_key=api_key, extra=extra), *named[1:]]


def print_comparison(servers: dict[str, Any], rounds: int) -> None:
    """The figures of every server, and how its goodput compares with the first one's."""
    first = next(iter(servers))
    for name, figures in servers.items():
        print(f"\n{name} ({figures['api']}, {rounds} rounds)")
        print_report(figures)
        if name != first and figures["ratio"] is not None:
            print(f"goodput of {first}: {figures['ratio']:.2f} times as much")


def print_report(report: dict[str, Any]) -> None:
    """The figures, line by line."""
    print(
        f"{report['requests']} requests, {report['failed']} failed, {report['seconds']:.1f} s, "
        f"{report['prompt_tokens']} tokens of prompts, {report['tokens']} of answers, "
        f"{report['tokens_per_second']:.1f} tokens/s"
    )
    for name in ("ttft", "tpot", "itl", "itl_beside_prompts"):
        figures = report[name]
        if figures["p50"] is not None:
            p50, p99 = figures["p50"] * 1e3, figures["p99"] * 1e3
            print(f"{name.replace('_', ' ')}  median {p50:.1f} ms, 99th percentile {p99:.1f} ms")
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

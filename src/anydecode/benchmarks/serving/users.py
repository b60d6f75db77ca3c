"""`anydecode bench users`: servers under a fixed number of users, each of whom sends the next
request when the previous one is answered."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, Any

import jsonschema_rs
import typer

from anydecode.benchmarks.serving.baselines import (
    median_ratio,
    parse_baseline,
    sigterm_as_exit,
    started_server,
    with_model,
)
from anydecode.benchmarks.serving.replay import Endpoint, RequestOutcome, percentiles, send
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import note, progress
from anydecode.report import JsonFile, table_console, write_report
from anydecode.tasks.spec_bench import questions

_TEXT = {"type": "string", "maxLength": 60}
_WORDS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4}
#: The schemas of typed answers and of the arguments of tools; they bound the answer's length.
SCHEMAS: dict[str, dict[str, Any]] = {
    "summary": {
        "type": "object",
        "properties": {
            "title": _TEXT,
            "keywords": _WORDS,
            "language": {"enum": ["English", "German", "French", "other"]},
        },
        "required": ["title", "keywords", "language"],
        "additionalProperties": False,
    },
    "assessment": {
        "type": "object",
        "properties": {
            "topic": _TEXT,
            "difficulty": {"type": "integer", "minimum": 1, "maximum": 5},
            "needs_sources": {"type": "boolean"},
            "steps": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"name": _TEXT, "minutes": {"type": "integer", "maximum": 90}},
                    "required": ["name", "minutes"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["topic", "difficulty", "needs_sources", "steps"],
        "additionalProperties": False,
    },
}
KINDS = ("text", "schema", "tool")


@dataclass(frozen=True)
class Task:
    """One request: its kind (one of `KINDS`), its body, and the schema of its answer, if any."""

    kind: str
    body: dict[str, Any]
    schema: dict[str, Any] | None = None

    def is_valid(self, outcome: RequestOutcome) -> bool:
        """Whether the answer is complete and satisfies the schema."""
        if self.schema is None:
            return True
        try:
            return bool(jsonschema_rs.is_valid(self.schema, json.loads(outcome.text)))
        except ValueError:
            return False


def make_task(kind: str, number: int, text: str, max_tokens: int) -> Task:
    """The request of a kind for the question `text`. The schemas take turns with `number`."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "text":
        return Task(kind, body)
    name, schema = list(SCHEMAS.items())[number % len(SCHEMAS)]
    if kind == "schema":
        described = {"name": name, "schema": schema, "strict": True}
        form: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": described}
        }
    else:
        function = {"name": name, "description": f"Store the {name}.", "parameters": schema}
        form = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,  # the defaults of servers differ
        }
    return Task(kind, {**body, **form}, schema)


async def run_users(
    endpoint: Endpoint,
    tasks: list[Task],
    users: int,
    timeout: float,
    done: Callable[[], None] = lambda: None,
) -> tuple[float, list[RequestOutcome]]:
    """Answer all tasks, `users` at a time.

    Returns:
        The seconds of the whole run, and the outcomes in the order of `tasks`.
    """
    import httpx

    outcomes = [RequestOutcome(0.0, 0) for _ in tasks]
    waiting = iter(list(zip(tasks, outcomes, strict=True)))
    # A connection per request: some servers close a connection after an answer without saying so.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=endpoint.url,
        headers=endpoint.headers,
        limits=limits,
        timeout=timeout,
        trust_env=False,
    ) as client:
        start = perf_counter()

        async def user() -> None:
            for task, outcome in waiting:
                outcome.at = perf_counter() - start
                body = {"model": endpoint.model, **task.body, **endpoint.extra}
                await send(client, "/chat/completions", body, outcome)
                done()

        await asyncio.gather(*(user() for _ in range(users)))
        return perf_counter() - start, outcomes


def results_of(runs: list[tuple[float, list[Task], list[RequestOutcome]]]) -> dict[str, Any]:
    """The results of one server with a number of users, over rounds: rates are medians over the
    rounds, and latencies are those of all requests, in seconds."""
    outcomes = [one for _, _, found in runs for one in found]
    pairs = [pair for _, tasks, found in runs for pair in zip(tasks, found, strict=True)]
    answered = [one for one in outcomes if one.error is None]
    typed = [(task, one) for task, one in pairs if task.schema is not None]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(answered),
        "errors": sorted({one.error for one in outcomes if one.error})[:5],
        "tokens": sum(one.tokens for one in answered),
        "typed": len(typed),
        "invalid": sum(not task.is_valid(one) for task, one in typed),
        "requests_per_second": [_rate(seconds, found) for seconds, _, found in runs],
        "tokens_per_second": statistics.median(
            sum(one.tokens for one in found) / seconds for seconds, _, found in runs
        ),
        "first": percentiles([one.first for one in answered if one.first is not None]),
        "seconds": percentiles([one.seconds for one in answered]),
    }


def _rate(seconds: float, outcomes: list[RequestOutcome]) -> float:
    return sum(one.error is None for one in outcomes) / seconds


def measure(
    endpoints: list[Endpoint],
    texts: list[str],
    users: list[int],
    requests: int,
    kinds: list[str],
    max_tokens: int,
    rounds: int,
    timeout: float,
) -> dict[str, dict[str, Any]]:
    """Measure every server with every number of users, in turns; the order of the servers changes
    from round to round.

    Args:
        endpoints: The servers.
        texts: Questions; every request starts with words of its own, so that no prompt is in a
            cache.
        users: Numbers of users.
        requests: Requests per run; at least twice the number of users.
        kinds: Kinds of requests (`KINDS`), which take turns.
        max_tokens: Most tokens of an answer.
        rounds: Number of rounds.
        timeout: Timeout of a request, in seconds.

    Returns:
        By server and number of users: `results_of`, with `ratio`, the requests per second of the
        first server over its own, median over rounds.
    """
    runs: dict[tuple[str, int], list[tuple[float, list[Task], list[RequestOutcome]]]] = {}
    random = Random(0)
    for endpoint in endpoints:
        warmup = [make_task(kind, 0, "Warm-up: what is a cache?", 8) for kind in kinds]
        _, outcomes = asyncio.run(run_users(endpoint, warmup, 1, timeout))
        for outcome in outcomes:
            if outcome.error is not None:
                raise InvalidRequestError(f"{endpoint.name} answered: {outcome.error}")
    for number in range(rounds):
        for count in users:
            chosen = random.choices(texts, k=max(requests, 2 * count))
            tasks = [
                make_task(
                    kinds[i % len(kinds)],
                    i // len(kinds),
                    f"Question {number}.{count}.{i}: {text}",
                    max_tokens,
                )
                for i, text in enumerate(chosen)
            ]
            for endpoint in endpoints if number % 2 == 0 else endpoints[::-1]:
                label = f"{endpoint.name}, {count} users, round {number + 1}"
                with progress("requests", len(tasks)) as bar:
                    bar.begin(label)
                    seconds, outcomes = asyncio.run(
                        run_users(endpoint, tasks, count, timeout, bar.advance)
                    )
                note(f"{label}: {_rate(seconds, outcomes):.2f} requests/s")
                runs.setdefault((endpoint.name, count), []).append((seconds, tasks, outcomes))
    results: dict[str, dict[str, Any]] = {}
    for (name, count), found in runs.items():
        results.setdefault(name, {})[str(count)] = results_of(found)
    first = results[endpoints[0].name]
    for by_users in results.values():
        for key, one in by_users.items():
            rates = first[key]["requests_per_second"], one["requests_per_second"]
            one["ratio"] = median_ratio(*rates)
    return results


def bench_users(
    start: Annotated[
        list[str],
        typer.Option(
            "--start",
            metavar="NAME=COMMAND",
            help="A server to start for this run, with {port} in its command; repeatable.",
        ),
    ],
    users: Annotated[
        list[int] | None, typer.Option("--users", min=1, help="Number of users; repeatable.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help=f"Kind of requests: {', '.join(KINDS)}; all by default."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Questions in Spec-Bench's form; default: the package's own."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests per run.")] = 32,
    output: Annotated[int, typer.Option("--output", min=1, help="Most tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 3,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Timeout of a request, in seconds.")
    ] = 600.0,
    json_file: JsonFile = None,
) -> None:
    """Measure servers under a fixed number of users, and compare the first with the others.

    Each user sends the next request when the previous one is answered: texts, typed answers and
    calls of tools in turns. Typed answers are validated. Answers end where the model ends them.

    Example: anydecode bench users --users 8 --start 'anydecode=anydecode serve --port {port}'
    """
    kinds = kind or list(KINDS)
    if unknown := [name for name in kinds if name not in KINDS]:
        raise InvalidRequestError(f"--kind is {unknown[0]!r}; allowed are {', '.join(KINDS)}")
    commands = [parse_baseline(text, "--start") for text in start]
    if len({name for name, _ in commands}) < len(commands):
        raise InvalidRequestError("two servers have the same name; give each a different one")
    texts = [question.text for question in questions(data, None)]
    report: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "kinds": kinds,
        "rounds": rounds,
    }
    with sigterm_as_exit(), ExitStack() as stack:
        endpoints = []
        for name, command in commands:
            note(f"starting {name}")
            url = stack.enter_context(started_server(name, command))
            endpoints.append(asyncio.run(with_model(Endpoint(name, url))))
        report["servers"] = measure(
            endpoints, texts, users or [1, 8, 32], requests, kinds, output, rounds, timeout
        )
    write_report(report, json_file, lambda: print_results(report))


def print_results(report: dict[str, Any]) -> None:
    """Print a table with one row per server and number of users."""
    from rich.table import Table

    print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores")
    table = Table()
    for title in (
        "server", "users", "requests/s", "tokens/s", "first token p50 / p99",
        "whole answer p50 / p99", "failed", "invalid", "first server's rate",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title == "server" else "right")
    for name, by_users in report["servers"].items():
        for count, one in by_users.items():
            table.add_row(
                name,
                count,
                f"{statistics.median(one['requests_per_second']):.2f}",
                f"{one['tokens_per_second']:.0f}",
                _milliseconds(one["first"]),
                _milliseconds(one["seconds"]),
                str(one["failed"]),
                f"{one['invalid']} of {one['typed']}",
                "" if one["ratio"] is None else f"{one['ratio']:.2f} times",
            )
    table_console().print(table)


def _milliseconds(values: dict[str, float | None]) -> str:
    if values["p50"] is None or values["p99"] is None:
        return ""
    return f"{values['p50'] * 1e3:.0f} / {values['p99'] * 1e3:.0f} ms"

"""Compares several servers under the same trace in one run. Rounds are interleaved, and servers are
compared by the ratio within a round. Prompts differ between runs, so that no run hits the prefix
cache of another; within a run every server may use its prefix cache."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from anydecode.benchmarks.serving.plot import draw_distributions
from anydecode.benchmarks.serving.replay import (
    Endpoint,
    Objective,
    RequestOutcome,
    gaps_during_prefill,
    percentiles,
    replay,
    summary,
)
from anydecode.benchmarks.serving.traces import Arrival
from anydecode.errors import InvalidRequestError
from anydecode.progress import note, progress

#: Request fields that some servers support and others refuse.
OPTIONAL_FIELDS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}

#: Warm-up requests per server.
NUM_WARMUP = 3


def parse_baseline(text: str, option: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`. Raises `InvalidRequestError`, which names `option`."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise InvalidRequestError(f"{option} is {text!r}; give NAME=VALUE")
    return name.strip(), value.strip()


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM within the block into `SystemExit`, so that servers started in it are stopped. A
    second SIGTERM is ignored, so that it does not interrupt the stopping. No effect outside the
    main thread, where no signal handler can be installed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def started_server(
    name: str, command: str, seconds: float = 300.0, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run the server `command`, in which `{port}` is replaced by a free port, until the block ends.
    `environment` is added to this process's.

    Yields:
        The URL of its API, once the server is ready.

    Raises:
        InvalidRequestError: If it is not ready within `seconds`; includes its last line of output.
    """
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise InvalidRequestError(f"{name} cannot be started: {error}") from None
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + seconds
            while not _is_ready(f"{url}/health", httpx):
                if process.poll() is not None:
                    message = (
                        f"{name} ended with exit code {process.returncode}{_last_line(output)}"
                    )
                    raise InvalidRequestError(message)
                if time.monotonic() > end:
                    message = f"{name} did not answer within {seconds:g} s{_last_line(output)}"
                    raise InvalidRequestError(message)
                time.sleep(0.02)
            yield f"{url}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str, httpx: Any) -> bool:
    """Whether a server accepts requests; llama-server returns 503 while it loads its model."""
    try:
        return bool(httpx.get(url, timeout=5, trust_env=False).status_code < 500)
    except httpx.HTTPError:
        return False


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


async def prepare(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Complete the endpoints with their models' names, the API that all of them support
    (completions or chat), and the optional fields that each accepts. `ignore_eos` is dropped from
    all endpoints unless all accept it.

    Raises:
        InvalidRequestError: If an endpoint supports neither API.
    """
    named = [await with_model(endpoint) for endpoint in endpoints]
    for chat in (False, True):
        found = [await _with_accepted_fields(replace(endpoint, chat=chat)) for endpoint in named]
        accepted = [one for one in found if isinstance(one, Endpoint)]
        if len(accepted) == len(named):
            all_ignore_eos = all("ignore_eos" in one.extra for one in accepted)
            return accepted if all_ignore_eos else [_without_ignore_eos(one) for one in accepted]
    problems = [
        f"{one.name} answered no request: {error}"
        for one, error in zip(named, found, strict=True)
        if isinstance(error, str)
    ]
    raise InvalidRequestError("; ".join(problems))


def _without_ignore_eos(endpoint: Endpoint) -> Endpoint:
    extra = {name: value for name, value in endpoint.extra.items() if name != "ignore_eos"}
    return replace(endpoint, extra=extra)


async def with_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the name of its first model, unless it has one. Raises
    `InvalidRequestError` if the server does not list its models."""
    import httpx

    if endpoint.model:
        return endpoint
    try:
        async with httpx.AsyncClient(
            trust_env=False, timeout=30, headers=endpoint.headers
        ) as client:
            models = (await client.get(f"{endpoint.url}/models")).json()["data"]
            return replace(endpoint, model=models[0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError):
        raise InvalidRequestError(
            f"{endpoint.name} does not list its models; give --baseline-model {endpoint.name}=NAME"
        ) from None


async def _with_accepted_fields(endpoint: Endpoint) -> Endpoint | str:
    """The endpoint with as many of `OPTIONAL_FIELDS` as it accepts; its error message if it
    accepts no request."""
    error = ""
    for names in (list(OPTIONAL_FIELDS), ["stream_options"], []):
        candidate = replace(
            endpoint, extra=endpoint.extra | {name: OPTIONAL_FIELDS[name] for name in names}
        )
        outcome = (await replay(candidate, [Arrival(0.0, 5, 2)]))[0]
        if outcome.error is None:
            return candidate
        error = outcome.error
    return error


@dataclass(frozen=True)
class Load:
    """The load of a benchmark: arrivals by rate (requests per second), the timeout of a request (in
    seconds), and the latency objective."""

    arrivals: Callable[[float], list[Arrival]]
    timeout: float
    objective: Objective

    def prepare_endpoints(self, endpoints: list[Endpoint]) -> list[Endpoint]:
        """Prepare `endpoints`, and warm up each with `NUM_WARMUP` requests."""
        found = asyncio.run(prepare(endpoints))
        warmup = [replace(arrival, at=0.0) for arrival in self.arrivals(1.0)[:NUM_WARMUP]]
        for endpoint in found:
            note(f"warming up {endpoint.name}")
            self._replay(endpoint, warmup, "warm-up", "warm-up")
        return found

    def run(self, endpoint: Endpoint, rate: float, number: int) -> list[RequestOutcome]:
        """Run the load once on one endpoint, in round `number`. Raises `InvalidRequestError` if
        every request fails."""
        label = f"round {number + 1}, {rate:g}/s"
        outcomes = self._replay(endpoint, self.arrivals(rate), f"{label} ", label)
        results = summary(outcomes, self.objective)
        first = results["ttft"]["p99"]
        note(
            f"{endpoint.name}, {label}: {results['seconds']:.1f} s, {results['failed']} failed, "
            f"{results['attainment']:.0%} met the objective, "
            f"{results['tokens_per_second']:.1f} tokens/s"
            + ("" if first is None else f", ttft 99th percentile {first * 1e3:.0f} ms")
        )
        return outcomes

    def _replay(
        self, endpoint: Endpoint, arrivals: list[Arrival], salt: str, label: str
    ) -> list[RequestOutcome]:
        step = f"{endpoint.name}, {label}"
        with progress("requests", len(arrivals)) as bar:
            bar.begin(step)
            replaying = replay(
                endpoint, arrivals, timeout=self.timeout, salt=salt, done=bar.advance
            )
            outcomes = asyncio.run(replaying)
        if all(one.error for one in outcomes):
            message = f"{endpoint.name}, {label}: every request failed: {outcomes[0].error}"
            raise InvalidRequestError(message)
        return outcomes


@dataclass
class Comparison:
    """The outcomes of all endpoints, by endpoint and round."""

    endpoints: list[Endpoint]
    outcomes: dict[str, list[list[RequestOutcome]]]

    def report(self, objective: Objective) -> dict[str, Any]:
        """Results of each endpoint over all rounds, its goodput per round, and `ratio`: the first
        endpoint's goodput over its own, median over rounds."""
        first = self.endpoints[0].name
        rates = {
            name: [summary(one, objective)["goodput_requests_per_second"] for one in rounds]
            for name, rounds in self.outcomes.items()
        }
        report = {}
        for endpoint in self.endpoints:
            rounds = self.outcomes[endpoint.name]
            summaries = [summary(one, objective) for one in rounds]
            report[endpoint.name] = {
                **_combined(summaries, rounds, objective),
                **request_form(endpoint),
                "goodput_per_round": rates[endpoint.name],
                "ratio": median_ratio(rates[first], rates[endpoint.name]),
            }
        return report

    def draw(self, file: Path, title: str, objective: Objective) -> None:
        """Draw one panel per latency, with one curve per endpoint."""
        merged = {
            name: [o for one in rounds for o in one] for name, rounds in self.outcomes.items()
        }
        panels = {
            "time to the first token": {n: [o.first for o in v if o.first is not None]
                                        for n, v in merged.items()},
            "time per token": {n: [o.per_token for o in v if o.per_token is not None]
                               for n, v in merged.items()},
            "time between tokens": {n: [gap for o in v for gap in o.gaps]
                                    for n, v in merged.items()},
        }  # fmt: skip
        limits = dict(zip(panels, (objective.ttft, objective.tpot), strict=False))
        draw_distributions(file, title, panels, limits)


def _combined(
    summaries: list[dict[str, Any]], rounds: list[list[RequestOutcome]], objective: Objective
) -> dict[str, Any]:
    """One summary over all rounds. Values of whole runs are medians over the runs; gaps during
    prefill are determined within each run."""
    results = summary([outcome for one in rounds for outcome in one], objective)
    gaps = [gap for one in rounds for gap in gaps_during_prefill(one)]
    results["itl_beside_prompts"] = percentiles(gaps)
    for name in ("seconds", "goodput_requests_per_second", "goodput_tokens_per_second",
                 "tokens_per_second"):  # fmt: skip
        results[name] = statistics.median(one[name] for one in summaries)
    return results


def request_form(endpoint: Endpoint) -> dict[str, Any]:
    """How requests to an endpoint are formed, for the report."""
    return {
        "api": "chat" if endpoint.chat else "completions",
        "ignores_eos": "ignore_eos" in endpoint.extra,
    }


def median_ratio(first: list[float], other: list[float]) -> float | None:
    """Median over rounds of one server's goodput over another's; None if the other's is always
    0."""
    ratios = [a / b for a, b in zip(first, other, strict=True) if b]
    return statistics.median(ratios) if ratios else None


def compare(endpoints: list[Endpoint], load: Load, rate: float, rounds: int) -> Comparison:
    """Replay at `rate` against every endpoint in turn, for `rounds` rounds, with the order reversed
    in every other round."""
    outcomes: dict[str, list[list[RequestOutcome]]] = {endpoint.name: [] for endpoint in endpoints}
    for number in range(rounds):
        for endpoint in endpoints if number % 2 == 0 else endpoints[::-1]:
            outcomes[endpoint.name].append(load.run(endpoint, rate, number))
    return Comparison(endpoints, outcomes)

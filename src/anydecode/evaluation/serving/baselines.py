"""Several servers under the same trace in one run: rounds are interleaved, and what is compared is
a ratio within a round. No run finds another's prompts in a prefix cache; within a run every server
may use its own."""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import IO, Any

from anydecode.errors import InvalidRequestError
from anydecode.evaluation.serving.plot import distribution_svg
from anydecode.evaluation.serving.replay import (
    Endpoint,
    Objective,
    Outcome,
    beside_prompts,
    replay,
    spread,
    summary,
)
from anydecode.evaluation.serving.traces import Arrival
from anydecode.evaluation.speculative_report import note, progress

#: Fields that some servers know and others refuse.
EXTRAS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}

#: Requests that every server answers before anything is measured.
WARM = 3


def parse_baseline(text: str, option: str) -> tuple[str, str]:
    """`NAME=VALUE`. Raises `InvalidRequestError`."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise InvalidRequestError(f"{option} wants NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that what was started in it is stopped. Once:
    the stopping is not interrupted by another. Off the main thread signals are others' business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def started(name: str, command: str, seconds: float = 300.0) -> Iterator[str]:
    """Runs `command`, in which `{port}` is a free port, until the block ends; gives the URL once
    the server answers. Raises `InvalidRequestError`, with the last it said, where it does not."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        except OSError as error:
            raise InvalidRequestError(f"{name} cannot be started: {error}") from None
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + seconds
            while not _answers(f"{url}/health", httpx):
                if process.poll() is not None:
                    told = f"{name} ended with exit code {process.returncode}{_last(said)}"
                    raise InvalidRequestError(told)
                if time.monotonic() > end:
                    told = f"{name} did not answer within {seconds:g} s{_last(said)}"
                    raise InvalidRequestError(told)
                time.sleep(0.1)
            yield f"{url}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str, httpx: Any) -> bool:
    """Whether a server takes requests; llama-server says 503 while it loads its model."""
    try:
        return bool(httpx.get(url, timeout=5, trust_env=False).status_code < 500)
    except httpx.HTTPError:
        return False


def _last(said: IO[str]) -> str:
    said.seek(0)
    lines = [line.strip() for line in said if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


async def prepared(endpoints: list[Endpoint]) -> list[Endpoint]:
    """The endpoints with their models' names, in the one API that all of them know, each with the
    further fields it takes; but no server goes on behind an end of text where another cannot be
    told to. Raises `InvalidRequestError` where one knows neither API."""
    named = [await _named(endpoint) for endpoint in endpoints]
    for chat in (False, True):
        found = [await _accepted(replace(endpoint, chat=chat)) for endpoint in named]
        fitting = [one for one in found if isinstance(one, Endpoint)]
        if len(fitting) == len(named):
            alike = all("ignore_eos" in one.extra for one in fitting)
            return fitting if alike else [_ending(one) for one in fitting]
    wrong = [
        f"{one.name} answered no request: {error}"
        for one, error in zip(named, found, strict=True)
        if isinstance(error, str)
    ]
    raise InvalidRequestError("; ".join(wrong))


def _ending(endpoint: Endpoint) -> Endpoint:
    kept = {name: value for name, value in endpoint.extra.items() if name != "ignore_eos"}
    return replace(endpoint, extra=kept)


async def _named(endpoint: Endpoint) -> Endpoint:
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
            f"{endpoint.name} does not tell its models; give --peer-model {endpoint.name}=NAME"
        ) from None


async def _accepted(endpoint: Endpoint) -> Endpoint | str:
    """The endpoint with as many of `EXTRAS` as it takes; if it takes no request, what it said."""
    error = ""
    for names in (list(EXTRAS), ["stream_options"], []):
        tried = replace(endpoint, extra=endpoint.extra | {name: EXTRAS[name] for name in names})
        outcome = (await replay(tried, [Arrival(0.0, 5, 2)]))[0]
        if outcome.error is None:
            return tried
        error = outcome.error
    return error


@dataclass(frozen=True)
class Load:
    """What is sent: the arrivals at a rate (requests a second), how long one request may take (in
    seconds), and what its user will bear."""

    arrivals: Callable[[float], list[Arrival]]
    timeout: float
    objective: Objective

    def ready(self, endpoints: list[Endpoint]) -> list[Endpoint]:
        """`endpoints`, prepared, each after `WARM` requests that are not counted."""
        found = asyncio.run(prepared(endpoints))
        warm = [replace(arrival, at=0.0) for arrival in self.arrivals(1.0)[:WARM]]
        for endpoint in found:
            note(f"warming up {endpoint.name}")
            self._answered(endpoint, warm, "warm-up", "warm-up")
        return found

    def run(self, endpoint: Endpoint, rate: float, number: int) -> list[Outcome]:
        """One run; `number` is of the round. Raises `InvalidRequestError` where every request
        fails."""
        label = f"round {number + 1}, {rate:g}/s"
        outcomes = self._answered(endpoint, self.arrivals(rate), f"{label} ", label)
        figures = summary(outcomes, self.objective)
        first = figures["ttft"]["p99"]
        note(
            f"{endpoint.name}, {label}: {figures['seconds']:.1f} s, {figures['failed']} failed, "
            f"{figures['attainment']:.0%} met the objective, "
            f"{figures['tokens_per_second']:.1f} tokens/s"
            + ("" if first is None else f", ttft 99th percentile {first * 1e3:.0f} ms")
        )
        return outcomes

    def _answered(
        self, endpoint: Endpoint, arrivals: list[Arrival], salt: str, label: str
    ) -> list[Outcome]:
        step = f"{endpoint.name}, {label}"
        with progress("requests", len(arrivals)) as advance:
            sending = replay(
                endpoint, arrivals, timeout=self.timeout, salt=salt, done=lambda: advance(step)
            )
            outcomes = asyncio.run(sending)
        if all(one.error for one in outcomes):
            told = f"{endpoint.name}, {label}: every request failed: {outcomes[0].error}"
            raise InvalidRequestError(told)
        return outcomes


@dataclass
class Comparison:
    """What `rounds` of all endpoints gave: per endpoint its outcomes, round by round."""

    endpoints: list[Endpoint]
    outcomes: dict[str, list[list[Outcome]]]

    def report(self, objective: Objective) -> dict[str, Any]:
        """Per endpoint the figures over all rounds, its goodput per round, and how many times the
        first endpoint's goodput is its own: the median over rounds."""
        first = self.endpoints[0].name
        rates = {
            name: [summary(one, objective)["goodput_requests_per_second"] for one in rounds]
            for name, rounds in self.outcomes.items()
        }
        told = {}
        for endpoint in self.endpoints:
            rounds = self.outcomes[endpoint.name]
            every = [summary(one, objective) for one in rounds]
            told[endpoint.name] = {
                **_together(every, rounds, objective),
                **terms(endpoint),
                "goodput_per_round": rates[endpoint.name],
                "ratio": median_ratio(rates[first], rates[endpoint.name]),
            }
        return told

    def picture(self, title: str, objective: Objective) -> str:
        """Three panels, one per latency, with a curve per endpoint."""
        every = {name: [o for one in rounds for o in one] for name, rounds in self.outcomes.items()}
        panels = [
            ("time to first token", {n: [o.first for o in v if o.first is not None]
                                     for n, v in every.items()}, objective.ttft),
            ("time per token", {n: [o.per_token for o in v if o.per_token is not None]
                                for n, v in every.items()}, objective.tpot),
            ("between tokens", {n: [gap for o in v for gap in o.gaps]
                                for n, v in every.items()}, float("inf")),
        ]  # fmt: skip
        parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 930">']
        for number, (name, curves, limit) in enumerate(panels):
            marks = {} if limit == float("inf") else {"objective": limit}
            panel = distribution_svg(f"{name} · {title}", curves, marks)
            position = f'<svg y="{310 * number}" width="640" height="300" '
            parts.append(panel.replace("<svg ", position, 1).rstrip())
        return "\n".join([*parts, "</svg>\n"])


def _together(
    every: list[dict[str, Any]], rounds: list[list[Outcome]], objective: Objective
) -> dict[str, Any]:
    """One summary over all rounds, in which what is per run is the median over runs. What a
    request waited beside belongs to its run."""
    figures = summary([outcome for one in rounds for outcome in one], objective)
    gaps = [gap for one in rounds for gap in beside_prompts(one)]
    figures["itl_beside_prompts"] = spread(gaps)
    for name in ("seconds", "goodput_requests_per_second", "goodput_tokens_per_second",
                 "tokens_per_second"):  # fmt: skip
        figures[name] = statistics.median(one[name] for one in every)
    return figures


def terms(endpoint: Endpoint) -> dict[str, Any]:
    """In which form an endpoint was asked."""
    return {
        "api": "chat" if endpoint.chat else "completions",
        "ignores_eos": "ignore_eos" in endpoint.extra,
    }


def median_ratio(ours: list[float], theirs: list[float]) -> float | None:
    """The median over rounds of one server's goodput over another's; None if the other had none."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return statistics.median(ratios) if ratios else None


def compare(endpoints: list[Endpoint], load: Load, rate: float, rounds: int) -> Comparison:
    """Replay at `rate` against every endpoint in turn, `rounds` times; the order is reversed in
    every other round."""
    outcomes: dict[str, list[list[Outcome]]] = {endpoint.name: [] for endpoint in endpoints}
    for number in range(rounds):
        for endpoint in endpoints if number % 2 == 0 else endpoints[::-1]:
            outcomes[endpoint.name].append(load.run(endpoint, rate, number))
    return Comparison(endpoints, outcomes)

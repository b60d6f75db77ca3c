"""Replays a trace against a server: sends each request at its time and records when its tokens
arrive."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from anydecode.benchmarks.serving.traces import Arrival, prompt_text


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server at `url` (…/v1). `chat` is whether chat completions are used
    instead of completions. `extra` are further fields of every request."""

    name: str
    url: str
    model: str = ""
    api_key: str | None = None
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass
class RequestOutcome:
    """The outcome of one request, as measured by the client.

    Attributes:
        at: When the request was sent, in seconds since the start of the replay.
        prompt: Prompt tokens, as reported by the server, else as requested.
        first: Time to the first chunk with text, in seconds since the request was sent.
        seconds: Time to the last chunk with text.
        tokens: Generated tokens, as reported by the server, else the number of chunks with text.
        times: Time of each chunk with text.
        text: The text, or the arguments of its tool calls.
        finish: Why the answer ended, as the server says it.
        error: The error message, if the request failed.
    """

    at: float
    prompt: int
    first: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Time per output token (TPOT): the time after the first token, per further token."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.seconds - self.first) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between consecutive chunks with text, in seconds."""
        return [later - earlier for earlier, later in pairwise(self.times)]


async def replay(
    endpoint: Endpoint,
    arrivals: list[Arrival],
    *,
    timeout: float = 300.0,
    salt: str = "",
    done: Callable[[], None] = lambda: None,
) -> list[RequestOutcome]:
    """Send `arrivals` to an endpoint as streamed requests.

    Args:
        endpoint: The server.
        arrivals: The requests and their times.
        timeout: Timeout of a request, in seconds.
        salt: Selects the words of the prompts.
        done: Called when a request ends.

    Returns:
        The outcomes, in the order of `arrivals`.
    """
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=endpoint.url.rstrip("/"),
        headers=endpoint.headers,
        limits=limits,
        timeout=timeout,
        trust_env=False,
    ) as client:
        start = perf_counter()

        async def one(number: int, arrival: Arrival) -> RequestOutcome:
            text = prompt_text(arrival, number, salt)
            messages = {"messages": [{"role": "user", "content": text}]}
            body = {
                "model": endpoint.model,
                **(messages if endpoint.chat else {"prompt": text}),
                "max_tokens": arrival.output,
                "temperature": 0,
                "stream": True,
                **endpoint.extra,
            }
            path = "/chat/completions" if endpoint.chat else "/completions"
            await asyncio.sleep(max(0.0, arrival.at - (perf_counter() - start)))
            outcome = RequestOutcome(arrival.at, arrival.prompt)
            await send(client, path, body, outcome)
            done()
            return outcome

        return list(await asyncio.gather(*(one(n, a) for n, a in enumerate(arrivals))))


async def send(client: Any, path: str, body: dict[str, Any], outcome: RequestOutcome) -> None:
    """Send one streamed request, and record in `outcome` what arrives and when."""
    start = perf_counter()
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = " ".join((await answer.aread()).decode(errors="replace").split())
                outcome.error = f"{answer.status_code}: {text[:200]}"
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                now = perf_counter() - start
                event = json.loads(line[5:])
                if "error" in event:
                    outcome.error = str(event["error"])[:200]
                usage = event.get("usage") or {}
                outcome.tokens = usage.get("completion_tokens") or outcome.tokens
                outcome.prompt = usage.get("prompt_tokens") or outcome.prompt
                choices = event.get("choices") or ()
                if text := "".join(map(_text, choices)):
                    outcome.times.append(now)
                    outcome.text += text
                for choice in choices:
                    outcome.finish = choice.get("finish_reason") or outcome.finish
    except Exception as error:  # any failure is this request's outcome
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.times:
        outcome.first, outcome.seconds = outcome.times[0], outcome.times[-1]
    outcome.tokens = outcome.tokens or len(outcome.times)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    text: str = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    calls = delta.get("tool_calls") or ()
    return text + "".join((call.get("function") or {}).get("arguments") or "" for call in calls)


@dataclass(frozen=True)
class Objective:
    """A latency objective (SLO): limits on TTFT and TPOT, in seconds."""

    ttft: float
    tpot: float

    def is_met(self, outcome: RequestOutcome) -> bool:
        """Whether a request succeeded within both limits."""
        if outcome.error is not None or outcome.first is None:
            return False
        return outcome.first <= self.ttft and (outcome.per_token or 0.0) <= self.tpot


def summary(outcomes: list[RequestOutcome], objective: Objective) -> dict[str, Any]:
    """Results of a run: median and 99th percentile of the latencies in seconds, and goodput, in
    requests and tokens per second of the requests that met the objective."""
    span = max((one.at + one.seconds for one in outcomes), default=0.0) or 1.0
    good = [one for one in outcomes if objective.is_met(one)]
    failed = [one for one in outcomes if one.error is not None]
    return {
        "requests": len(outcomes),
        "failed": len(failed),
        "errors": sorted({one.error for one in failed if one.error})[:5],
        "seconds": span,
        "prompt_tokens": sum(one.prompt for one in outcomes),
        "tokens": sum(one.tokens for one in outcomes),
        "tokens_per_second": sum(one.tokens for one in outcomes) / span,
        "ttft": percentiles([one.first for one in outcomes if one.first is not None]),
        "tpot": percentiles([one.per_token for one in outcomes if one.per_token is not None]),
        "itl": percentiles([gap for one in outcomes for gap in one.gaps]),
        "itl_beside_prompts": percentiles(gaps_during_prefill(outcomes)),
        "slo": {"ttft": objective.ttft, "tpot": objective.tpot},
        "attainment": len(good) / len(outcomes) if outcomes else 0.0,
        "goodput_requests_per_second": len(good) / span,
        "goodput_tokens_per_second": sum(one.tokens for one in good) / span,
    }


def gaps_during_prefill(outcomes: list[RequestOutcome]) -> list[float]:
    """Gaps between tokens during which another request of the run waited for its first token, in
    seconds."""
    waits: list[tuple[float, float]] = []  # disjoint intervals, by time
    for at, first in sorted((one.at, one.first) for one in outcomes if one.first is not None):
        begin, end = at, at + first
        if waits and begin <= waits[-1][1]:
            begin, end = waits[-1][0], max(end, waits[-1][1])
            waits.pop()
        waits.append((begin, end))
    ends = [end for _, end in waits]
    gaps = []
    for one in outcomes:
        for earlier, later in pairwise(one.at + time for time in one.times):
            index = bisect_right(ends, earlier)  # the first wait that ends after the gap starts
            if index < len(waits) and waits[index][0] < later:
                gaps.append(later - earlier)
    return gaps


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Median and 99th percentile (nearest rank); None if there are no values."""
    if not values:
        return {"p50": None, "p99": None}
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 99)}

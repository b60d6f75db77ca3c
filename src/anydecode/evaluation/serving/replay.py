"""A trace against a server: every request at its time, every token with its own."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from anydecode.errors import MissingPackageError
from anydecode.evaluation.serving.traces import Arrival, prompt_text


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks OpenAI's API at `url` (…/v1). `chat`: conversations, not completions.
    `extra` goes with every request."""

    name: str
    url: str
    model: str = ""
    api_key: str | None = None
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """What every call carries."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass
class Outcome:
    """One request as the client saw it; times in seconds since it was sent. `times`: when each
    chunk with text came. `prompt` and `tokens` are what the server counted, or what was asked for
    and the number of chunks."""

    at: float
    prompt: int
    first: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """TPOT: the time after the first token, per further token."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.seconds - self.first) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between chunks with text."""
        return [later - earlier for earlier, later in pairwise(self.times)]


async def replay(
    endpoint: Endpoint,
    arrivals: list[Arrival],
    *,
    timeout: float = 300.0,
    salt: str = "",
    done: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Send `arrivals` to an endpoint as streams; outcomes in the same order. `salt` chooses the
    words of the prompts; `done` is called as each request ends."""
    try:
        import httpx
    except ImportError:
        raise MissingPackageError("this benchmark", "httpx", "'anydecode[server]'") from None

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=endpoint.url.rstrip("/"),
        headers=endpoint.headers,
        limits=limits,
        timeout=timeout,
        trust_env=False,
    ) as client:
        began = perf_counter()

        async def one(number: int, arrival: Arrival) -> Outcome:
            text = prompt_text(arrival, number, salt)
            said = {"messages": [{"role": "user", "content": text}]}
            body = {
                "model": endpoint.model,
                **(said if endpoint.chat else {"prompt": text}),
                "max_tokens": arrival.output,
                "temperature": 0,
                "stream": True,
                **endpoint.extra,
            }
            path = "/chat/completions" if endpoint.chat else "/completions"
            await asyncio.sleep(max(0.0, arrival.at - (perf_counter() - began)))
            outcome = await _ask(client, path, body, arrival)
            done()
            return outcome

        return list(await asyncio.gather(*(one(n, a) for n, a in enumerate(arrivals))))


async def _ask(client: Any, path: str, body: dict[str, Any], arrival: Arrival) -> Outcome:
    outcome = Outcome(arrival.at, arrival.prompt)
    began = perf_counter()
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = " ".join((await answer.aread()).decode(errors="replace").split())
                outcome.error = f"{answer.status_code}: {text[:200]}"
                return outcome
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                now = perf_counter() - began
                event = json.loads(line[5:])
                if "error" in event:
                    outcome.error = str(event["error"])[:200]
                usage = event.get("usage") or {}
                outcome.tokens = usage.get("completion_tokens") or outcome.tokens
                outcome.prompt = usage.get("prompt_tokens") or outcome.prompt
                if any(map(_text, event.get("choices") or ())):
                    outcome.times.append(now)
    except Exception as error:  # whatever a network can do is this request's outcome
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.times:
        outcome.first, outcome.seconds = outcome.times[0], outcome.times[-1]
    outcome.tokens = outcome.tokens or len(outcome.times)
    return outcome


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    found: str = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    return found


@dataclass(frozen=True)
class Objective:
    """What a user will bear, in seconds: to the first token, and per further token."""

    ttft: float
    tpot: float

    def met(self, outcome: Outcome) -> bool:
        """Whether a request kept within both."""
        if outcome.error is not None or outcome.first is None:
            return False
        return outcome.first <= self.ttft and (outcome.per_token or 0.0) <= self.tpot


def summary(outcomes: list[Outcome], objective: Objective) -> dict[str, Any]:
    """The figures of a run: median and 99th percentile in seconds, and goodput, in requests and
    tokens a second of the requests that met the objective."""
    span = max((one.at + one.seconds for one in outcomes), default=0.0) or 1.0
    good = [one for one in outcomes if objective.met(one)]
    failed = [one for one in outcomes if one.error is not None]
    return {
        "requests": len(outcomes),
        "failed": len(failed),
        "errors": sorted({one.error for one in failed if one.error})[:5],
        "seconds": span,
        "prompt_tokens": sum(one.prompt for one in outcomes),
        "tokens": sum(one.tokens for one in outcomes),
        "tokens_per_second": sum(one.tokens for one in outcomes) / span,
        "ttft": spread([one.first for one in outcomes if one.first is not None]),
        "tpot": spread([one.per_token for one in outcomes if one.per_token is not None]),
        "itl": spread([gap for one in outcomes for gap in one.gaps]),
        "itl_beside_prompts": spread(beside_prompts(outcomes)),
        "slo": {"ttft": objective.ttft, "tpot": objective.tpot},
        "attainment": len(good) / len(outcomes) if outcomes else 0.0,
        "goodput_requests_per_second": len(good) / span,
        "goodput_tokens_per_second": sum(one.tokens for one in good) / span,
    }


def beside_prompts(outcomes: list[Outcome]) -> list[float]:
    """The gaps between tokens during which some request of the run waited for its first."""
    waits: list[tuple[float, float]] = []  # apart from each other, by time
    for at, first in sorted((one.at, one.first) for one in outcomes if one.first is not None):
        begin, end = at, at + first
        if waits and begin <= waits[-1][1]:
            begin, end = waits[-1][0], max(end, waits[-1][1])
            waits.pop()
        waits.append((begin, end))
    ends = [end for _, end in waits]
    found = []
    for one in outcomes:
        for earlier, later in pairwise(one.at + time for time in one.times):
            position = bisect_right(ends, earlier)  # the first wait that is not over before the gap
            if position < len(waits) and waits[position][0] < later:
                found.append(later - earlier)
    return found


def spread(values: list[float]) -> dict[str, float | None]:
    """Median and 99th percentile (nearest rank); None where there are no values."""
    if not values:
        return {"p50": None, "p99": None}
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 99)}

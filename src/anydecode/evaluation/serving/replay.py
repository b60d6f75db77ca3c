"""A trace against a server: every request at its time, every token with its own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.evaluation.serving.traces import Arrival, prompt_text


@dataclass
class Outcome:
    """One request as the client saw it; times in seconds. `gaps` lie between chunks with text;
    `tokens` is what the server counted, or the number of chunks."""

    at: float
    prompt: int
    first: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """TPOT: the time after the first token, per further token."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.seconds - self.first) / (self.tokens - 1)


async def replay(
    url: str,
    arrivals: list[Arrival],
    *,
    model: str,
    api_key: str | None = None,
    timeout: float = 300.0,
    extra: dict[str, Any] | None = None,
    chat: bool = False,
    plain: bool = False,
) -> list[Outcome]:
    """Send `arrivals` to `url` (…/v1) as streamed completions, or conversations of one message
    (`chat`); outcomes in the same order. `plain`: without fields that not every server knows."""
    try:
        import httpx
    except ImportError:
        raise InvalidRequestError("this needs httpx: pip install 'anydecode[server]'") from None

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as client:
        began = perf_counter()

        async def one(number: int, arrival: Arrival) -> Outcome:
            text = prompt_text(arrival, number)
            asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
            further = {} if plain else {"ignore_eos": True, "stream_options": _USAGE}
            body = {
                "model": model,
                **asked,
                "max_tokens": arrival.output,
                "temperature": 0,
                "stream": True,
                **further,
                **(extra or {}),
            }
            path = "/chat/completions" if chat else "/completions"
            await asyncio.sleep(max(0.0, arrival.at - (perf_counter() - began)))
            return await _ask(client, path, body, arrival)

        return list(await asyncio.gather(*(one(n, a) for n, a in enumerate(arrivals))))


_USAGE = {"include_usage": True}


async def _ask(client: Any, path: str, body: dict[str, Any], arrival: Arrival) -> Outcome:
    outcome = Outcome(arrival.at, arrival.prompt)
    began = last = perf_counter()
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                outcome.error = f"{answer.status_code}: {text[:200]}"
                return outcome
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                now = perf_counter()
                event = json.loads(line[5:])
                if "error" in event:
                    outcome.error = str(event["error"])[:200]
                counted = (event.get("usage") or {}).get("completion_tokens")
                if counted:
                    outcome.tokens = counted
                if any(map(_text, event.get("choices") or ())):
                    if outcome.first is None:
                        outcome.first = now - began
                    else:
                        outcome.gaps.append(now - last)
                    last = now
    except Exception as error:  # whatever a network can do is this request's outcome
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = last - began
    outcome.tokens = outcome.tokens or len(outcome.gaps) + (outcome.first is not None)
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
        "tokens": sum(one.tokens for one in outcomes),
        "tokens_per_second": sum(one.tokens for one in outcomes) / span,
        "ttft": spread([one.first for one in outcomes if one.first is not None]),
        "tpot": spread([one.per_token for one in outcomes if one.per_token is not None]),
        "itl": spread([gap for one in outcomes for gap in one.gaps]),
        "slo": {"ttft": objective.ttft, "tpot": objective.tpot},
        "attainment": len(good) / len(outcomes) if outcomes else 0.0,
        "goodput_requests_per_second": len(good) / span,
        "goodput_tokens_per_second": sum(one.tokens for one in good) / span,
    }


def spread(values: list[float]) -> dict[str, float | None]:
    """Median and 99th percentile (nearest rank); None where there are no values."""
    if not values:
        return {"p50": None, "p99": None}
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 99)}

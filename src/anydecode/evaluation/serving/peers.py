"""Several servers under the same trace in one run: rounds are interleaved, and what is compared is
a ratio within a round."""

from __future__ import annotations

import asyncio
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.evaluation.serving.plot import distribution_svg
from anydecode.evaluation.serving.replay import Objective, Outcome, replay, summary
from anydecode.evaluation.serving.traces import Arrival

#: Fields that some servers know and others refuse.
EXTRAS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


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


def parse_peer(text: str, option: str) -> tuple[str, str]:
    """`NAME=VALUE`. Raises `InvalidRequestError`."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise InvalidRequestError(f"{option} wants NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


@contextmanager
def started(name: str, command: str, seconds: float = 600.0) -> Iterator[str]:
    """Runs `command`, in which `{port}` is a free port, until the block ends; gives the URL once
    the server answers. Raises `InvalidRequestError` where it does not."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = subprocess.DEVNULL
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    try:
        process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError as error:
        raise InvalidRequestError(f"{name} cannot be started: {error}") from None
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(int(seconds / 0.1)):
            if process.poll() is not None:
                raise InvalidRequestError(f"{name} ended with exit code {process.returncode}")
            try:
                if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code < 500:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        else:
            raise InvalidRequestError(f"{name} did not answer within {seconds:g} s")
        yield f"{url}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def prepared(endpoints: list[Endpoint]) -> list[Endpoint]:
    """The endpoints with their models' names, in the one API that all of them know, each with the
    further fields it takes. Raises `InvalidRequestError` where one knows neither."""
    named = [await _named(endpoint) for endpoint in endpoints]
    for chat in (False, True):
        found = [await _accepted(replace(endpoint, chat=chat)) for endpoint in named]
        if all(found):
            return [endpoint for endpoint in found if endpoint is not None]
    wrong = [one.name for one, fits in zip(named, found, strict=True) if fits is None]
    raise InvalidRequestError(f"{', '.join(wrong)} answered no request, whatever its form")


async def _named(endpoint: Endpoint) -> Endpoint:
    import httpx

    if endpoint.model:
        return endpoint
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30, headers=headers) as client:
            models = (await client.get(f"{endpoint.url}/models")).json()["data"]
            return replace(endpoint, model=models[0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError):
        raise InvalidRequestError(
            f"{endpoint.name} does not tell its models; give --peer-model {endpoint.name}=NAME"
        ) from None


async def _accepted(endpoint: Endpoint) -> Endpoint | None:
    """The endpoint with as many of `EXTRAS` as it takes; None if it takes no request."""
    for names in (list(EXTRAS), ["stream_options"], []):
        tried = replace(endpoint, extra=endpoint.extra | {name: EXTRAS[name] for name in names})
        outcome = (await sent(tried, [Arrival(0.0, 5, 2)], timeout=300.0))[0]
        if outcome.error is None:
            return tried
    return None


async def sent(endpoint: Endpoint, arrivals: list[Arrival], timeout: float) -> list[Outcome]:
    """Replay `arrivals` against one endpoint."""
    return await replay(
        endpoint.url,
        arrivals,
        model=endpoint.model,
        api_key=endpoint.api_key,
        timeout=timeout,
        extra=endpoint.extra,
        chat=endpoint.chat,
        plain=True,
    )


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
            figures = summary([outcome for one in rounds for outcome in one], objective)
            for name in ("seconds", "goodput_requests_per_second", "goodput_tokens_per_second",
                         "tokens_per_second"):  # fmt: skip
                figures[name] = statistics.median(one[name] for one in every)
            pairs = zip(rates[first], rates[endpoint.name], strict=True)
            ratios = [ours / theirs for ours, theirs in pairs if theirs]
            told[endpoint.name] = {
                **figures,
                "api": "chat" if endpoint.chat else "completions",
                "ignores_eos": "ignore_eos" in endpoint.extra,
                "goodput_per_round": rates[endpoint.name],
                "ratio": statistics.median(ratios) if ratios else None,
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
            place = f'<svg y="{310 * number}" width="640" height="300" '
            parts.append(panel.replace("<svg ", place, 1).rstrip())
        return "\n".join([*parts, "</svg>\n"])


def compare(
    endpoints: list[Endpoint], arrivals: list[Arrival], rounds: int, timeout: float
) -> Comparison:
    """Replay `arrivals` against every endpoint in turn, `rounds` times; the order is reversed in
    every other round."""
    ready = asyncio.run(prepared(endpoints))
    outcomes: dict[str, list[list[Outcome]]] = {endpoint.name: [] for endpoint in ready}
    for number in range(rounds):
        for endpoint in ready if number % 2 == 0 else ready[::-1]:
            outcomes[endpoint.name].append(asyncio.run(sent(endpoint, arrivals, timeout)))
    return Comparison(ready, outcomes)

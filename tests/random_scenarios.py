"""Random requests of every method and option, side by side on a used engine, compared with the same
requests alone on new engines.

    python tests/random_scenarios.py --seed 7 --seconds 600 [--worlds tiny,mamba] [--decoders auto]

plays scenarios until the time is over. A scenario is plain data: a world (`random_worlds`), options
of the engine, requests, and when each starts. One that fails is made as small as possible and
printed; `--scenario "{...}"` plays one again.
"""

from __future__ import annotations

import argparse
import ast
import gc
import logging
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import anydecode
from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.api.methods import build_decoder
from anydecode.api.request import Request
from anydecode.catalogue import Flag, Range, Words, cards, kind_of
from anydecode.certification.oracles.speculative.auto import BatchCosts
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.decoders.decoder import Decoder
from anydecode.errors import AnydecodeError, InvalidRequestError, OutOfMemoryError
from anydecode.sampling.preset import SamplerPreset
from random_worlds import WORLDS, world

PROMPTS: list[str | list[int]] = [
    "one two three one two three one",
    "a lazy dog and a lazy",
    "zqzqzqzq",
    "abc abd abc abd abc",
    "the",
    "a",
    [0],
    [],
    "a text so long that its prompt takes several passes, and then some more of the same text " * 2,
    "a text so long that its prompt takes several passes, and then some more of another text",
    'name: "x", name: "y", name: "',
    "what is 1 + 2?\n\nthink",
]
CONSTRAINTS = [
    "Regex('[a-z ]{5,60}')",
    "Regex('(ab|cd)*e')",
    "Regex('[0-9]{3}', engine='xgrammar')",
    "Choice(['red', 'green', 'a'])",
    "Choice(['one two', 'one three'])",
    'Grammar(\'start: "a" start "b" | "x"\')',
    "Grammar('root ::= [a-c]+ \".\"', syntax='gbnf')",
    "JsonSchema({'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a']})",
    "JsonSchema({'type': 'array', 'items': {'enum': [1, 2, 3]}, 'uniqueItems': True, 'minItems': 2,"
    " 'maxItems': 3})",
    "JsonSchema({'type': 'string', 'maxLength': 8}, close=True)",
    "JsonSchema({'enum': ['x', 'yy']}, engine='xgrammar')",
    "Predicate(lambda text: len(text) == 5, lambda text: len(text) <= 5)",
]
#: By the name of an option: random values.
RARE: dict[str, Callable[[Random], Any]] = {
    "top_k": lambda r: r.choice([1, 3, 20]),
    "top_p": lambda r: r.choice([0.1, 0.9]),
    "min_p": lambda r: r.choice([0.05, 1.0]),
    "typical_p": lambda r: 0.8,
    "epsilon": lambda r: 0.01,
    "eta": lambda r: 0.01,
    "top_n_sigma": lambda r: 1.5,
    "xtc_probability": lambda r: 0.5,
    "top_w": lambda r: True,
    "mirostat": lambda r: r.choice([1, 2]),
    "repetition_penalty": lambda r: r.choice([0.7, 1.3]),
    "presence_penalty": lambda r: r.choice([-0.5, 0.5]),
    "frequency_penalty": lambda r: 0.3,
    "dry_multiplier": lambda r: 0.8,
    "momentum_alpha": lambda r: 0.2,
    "logit_bias": lambda r: r.choice([{256: 4.0}, {97: -float("inf")}, {101: 3.0, 32: 2.0}]),
    "banned_words": lambda r: r.choice([["ab"], [[98], [99, 100]]]),
    "banned_strings": lambda r: r.choice([["a"], ["ab", "e"], ["zz"], [" "]]),
    "no_repeat_ngram": lambda r: r.choice([1, 2, 3]),
    "guidance_scale": lambda r: r.choice([0.0, 1.5]),
    "negative_prompt": lambda r: r.choice(["", "zq", "a lazy dog"]),
    "dola_layers": lambda r: r.choice(["low", "high"]),
    "min_tokens": lambda r: r.choice([1, 5, 30]),
    "stop": lambda r: r.choice(["e", ["ab", "qu"], ["\n", " a"], ["zqz"]]),
    "stop_tokens": lambda r: [r.randrange(256), r.randrange(97, 123)],
    "include_stop": lambda r: True,
    "n": lambda r: r.choice([2, 3]),
    "logprobs": lambda r: r.choice([0, 2]),
    "processed_logprobs": lambda r: True,
    "prompt_logprobs": lambda r: r.choice([0, 2]),
    "sampler": lambda r: _method(r, r.choice(samplers())),
    "constraint": lambda r: r.choice(CONSTRAINTS),
    "adapter": lambda r: r.choice(["adapter 0", "adapter 1"]),
    "trace": lambda r: True,
    "priority": lambda r: r.randrange(3),
    "namespace": lambda r: r.choice(["x", "y"]),
    "prediction": lambda r: r.choice(["one two three", "eeeeeee", [101, 101]]),
    "segment": lambda r: r.choice([1, 4, 16]),
    "thinking_token_budget": lambda r: r.choice([0, 3]),
    "first_finish": lambda r: 1,
    "max_tokens": lambda r: 0,
}
#: Options that do not change the text.
NEUTRAL = ("trace", "priority", "namespace", "prediction", "segment")
SCHEDULES = [None, None, "priority", "sarathi", "sarathi-serve", "fair", "prepacking", "nexus",
             "layered-prefill", "online-offline"]  # fmt: skip
#: Maximum number of steps of the engine that a scenario, or a request alone, takes.
MAX_STEPS = 20_000
_NAMES = {name: getattr(anydecode, name) for name in
          ("Regex", "Choice", "Grammar", "JsonSchema", "Predicate")}  # fmt: skip


@cache
def samplers() -> tuple[str, ...]:
    keys = [card.key for card in cards() if issubclass(kind_of(card.key) or object, SamplerPreset)]
    return tuple(keys)


@cache
def decoders() -> tuple[str, ...]:
    return tuple(card.key for card in cards() if issubclass(kind_of(card.key) or object, Decoder))


@cache
def _constraint(source: str) -> Any:
    return eval(source, _NAMES)


@dataclass(frozen=True)
class Scenario:
    """What is played.

    Attributes:
        world: A name of `WORLDS`.
        engine: Options of the engine, and "cost", the number of a cost model.
        requests: The prompt and options of each request.
        events: ("start", request), ("cancel", request), ("steps", count), ("preempt", number),
            ("clear", 0).
    """

    world: str
    engine: dict[str, Any]
    requests: list[dict[str, Any]]
    events: list[tuple[str, int]]

    def source(self) -> str:
        """As a literal that `--scenario` reads."""
        parts = {
            "world": self.world,
            "engine": self.engine,
            "requests": self.requests,
            "events": self.events,
        }
        return repr(parts).replace("-inf", "-1e999").replace(" inf", " 1e999")


@dataclass(frozen=True)
class Failure:
    """What is wrong: its kind, the decoder, and the details."""

    kind: str
    decoder: str
    detail: str = field(compare=False, default="")


def random_scenario(random: Random, worlds: Seq[str], keys: Seq[str] = ()) -> Scenario:
    """A scenario with between two and twelve requests of some methods that the world allows."""
    name = random.choice(worlds)
    allowed = [key for key in accepted(name) if not keys or key in keys]
    if not allowed:
        return Scenario(name, {}, [], [])
    chosen = [random.choice(allowed) for _ in range(random.choice([1, 2, 4]))]
    chosen = [_method(random, key) for key in chosen]
    prompts = random.sample(PROMPTS, 4)
    positions = random.choice([200, 400, 800, 4096])
    prompts.append([(7 * i + 3) % 250 for i in range(positions - random.randrange(-1, 4))])
    engine: dict[str, Any] = {
        "cache_positions": positions,
        "row_budget": random.choice([3, 16, 64, 512]),
        "prefix_cache": random.random() < 0.8,
        "drafting": random.choice(["smartspec-server", "smartspec-server", "fixed"]),
        "schedule": random.choice(SCHEDULES),
        "max_running": random.choice([1, 2, 4, 256]),
        "cost": random.choice([0, 0, 1, 2]),
    }
    if random.random() < 0.2:
        engine["cache"] = random.choice(world(name).cache_formats)
    if random.random() < 0.15 and engine["prefix_cache"]:
        engine["prefix_spill"] = "memory"
    weights = [10, 10, 10, 10, 3]
    requests: list[dict[str, Any]] = []
    for _ in range(random.randrange(2, 12)):
        if requests and random.random() < 0.15:
            requests.append(dict(random.choice(requests)))
            continue
        request: dict[str, Any] = {
            "prompt": random.choices(prompts, weights)[0],
            "decoder": random.choice(chosen),
            "max_tokens": random.choice([1, 2, 5, 17, 40, 90]),
            "temperature": random.choice([0.0, 0.0, 0.0, 0.3, 0.8, 1.2]),
            "seed": random.randrange(8),
            "ignore_eos": random.random() < 0.7,
        }
        for option, value in RARE.items():
            if random.random() < 0.03:
                request[option] = value(random)
        if "processed_logprobs" in request or "logprobs" in request:
            request.setdefault("logprobs", 1)
        if "negative_prompt" in request:
            request.setdefault("guidance_scale", 1.5)
        if "first_finish" in request:
            request |= {"n": 3, "temperature": 0.9, "ignore_eos": False}
        requests.append(request)
    return Scenario(name, engine, requests, list(_events(random, len(requests))))


def _events(random: Random, count: int) -> Iterator[tuple[str, int]]:
    max_gap = random.choice([1, 4, 30])
    for number in range(count):
        yield "start", number
        if random.random() < 0.6:
            yield "steps", random.randrange(1, max_gap + 1)
        if random.random() < 0.06:
            yield "cancel", random.randrange(number + 1)
        if random.random() < 0.15:
            yield "preempt", random.randrange(100)
        if random.random() < 0.02:
            yield "clear", 0
    while random.random() < 0.3:
        yield "steps", random.randrange(1, 10)
        yield random.choice(["cancel", "preempt"]), random.randrange(count)


def _method(random: Random, key: str) -> str:
    """The method `key`, sometimes with random parameters that requests to a server may set."""
    if random.random() < 0.6:
        return key
    entry = catalogue.find(key)
    given = []
    for name, bounds in entry.card.remote.items():
        if random.random() < 0.4:
            value = _value(random, name, bounds, entry)
            if value is not None:
                given.append(f"{name}={value}")
    return f"{key}:{','.join(given)}" if given else key


def _value(random: Random, name: str, bounds: Any, entry: catalogue.Entry) -> Any:
    if isinstance(bounds, Flag):
        return random.choice(["true", "false"])
    if isinstance(bounds, Words):
        return random.choice(bounds.words)
    if isinstance(bounds, Range):
        if isinstance(bounds.min, float) or isinstance(bounds.max, float) or name in _FRACTIONS:
            low, high = bounds.min, min(bounds.max, bounds.min + 4)
            return random.choice([low, high, round(random.uniform(low, high), 3)])
        low, high = int(bounds.min), int(min(bounds.max, bounds.min + 24))
        return random.choice([low, min(low + 1, high), random.randint(low, high)])
    if name in ("drafter", "decoder"):
        return random.choice(["prompt-lookup", "suffix", "token-recycling", "autoregressive"])
    if name == "drafters":
        return random.choice(["suffix+stand", "prompt-lookup+suffix", "suffix"])
    return None


#: Parameters with ranges of whole numbers that may be fractions.
_FRACTIONS = {
    "threshold", "memory", "weight", "top_p", "mass", "smoothing", "bound", "rate", "confidence",
    "lenience", "discount", "ratio", "replay", "fixed", "per_row", "row_cost", "eta", "alpha",
    "sigma", "share", "temperature", "probability", "p", "epsilon", "slope", "low", "high", "decay",
    "power", "gamma", "mixture", "nucleus", "settled", "entropy", "drift", "edit", "guidance",
    "keep", "factor", "relaxed", "penalty", "strength", "scale", "budget", "propagate", "sparse",
}  # fmt: skip


@cache
def accepted(name: str) -> tuple[str, ...]:
    """The decoders that a world allows. Each refusal is one line."""
    found = []
    with world(name).open(cache_positions=512) as llm:
        for key in decoders():
            try:
                llm.request("abc", decoder=key)
            except InvalidRequestError as error:
                check_message(error)
                try:
                    llm.request("abc", decoder=key, temperature=0.7)
                except InvalidRequestError:
                    continue
            found.append(key)
        llm.engine.check_integrity()
    return tuple(found)


def check_message(error: Exception) -> None:
    """Check that an error is one line."""
    text = str(error)
    assert text.strip() and "\n" not in text and len(text) <= 1000, f"not one line: {text!r}"


def resolved(request: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `LLM.request`."""
    found = dict(request)
    if isinstance(found.get("constraint"), str):
        found["constraint"] = _constraint(found["constraint"])
    return found


Outcome = tuple[str, Any]


def outcome_of(request: Request) -> Outcome:
    """What a finished request has returned: its samples, or its error."""
    try:
        found = request.generation()
    except OutOfMemoryError as error:
        check_message(error)
        assert "the key-value cache holds" in str(error), str(error)
        assert str(error).endswith("; increase cache_positions"), str(error)
        return "out of memory", None
    except InvalidRequestError as error:
        return "refused late", str(error)
    except AnydecodeError as error:
        return "error", f"{type(error).__name__}: {error}"
    except Exception as error:
        cause = error.__cause__ or error
        lines = traceback.format_exception(cause)
        return "exception", f"{type(cause).__name__}: {cause}\n{''.join(lines[-4:])}"
    samples = [
        (one.tokens, one.finish_reason, one.text, _plain_logprobs(one.logprobs))
        for one in found.samples
    ]
    return "texts", (samples, _plain_logprobs(found.prompt_logprobs))


def _plain_logprobs(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [None if one is None else (one.token, one.logprob, tuple(one.top)) for one in logprobs]


#: The outcomes of requests alone, by all that they depend on.
_alone: dict[str, Outcome] = {}


def alone(name: str, engine: dict[str, Any], request: dict[str, Any]) -> Outcome:
    """The outcome of a request alone on a new engine."""
    options = {key: engine[key] for key in ("cache_positions", "cache") if key in engine}
    key = repr((name, options, request))
    if key not in _alone:
        if len(_alone) > 5000:
            _alone.clear()
        with world(name).open(**options, prefix_cache=False) as llm:
            try:
                one = llm.request(**resolved(request))
            except AnydecodeError as error:
                check_message(error)
                _alone[key] = "refused", str(error)
            else:
                llm.start(one, background=False)
                steps = iter(range(MAX_STEPS))
                llm.driver.advance(lambda: one.done or next(steps, None) is None)
                _alone[key] = outcome_of(one) if one.done else ("endless", None)
                one = None
    return _alone[key]


def is_exact(request: dict[str, Any]) -> bool:
    """Whether the text must be that of plain decoding."""
    built = build_decoder(request["decoder"])
    assert isinstance(built, Decoder)
    is_greedy = not request.get("temperature")
    return built.exactness == "token-exact" or (built.exactness == "greedy-exact" and is_greedy)


def compared_with(request: dict[str, Any]) -> dict[str, Any]:
    """The request whose text that of `request` must be: of plain decoding for an exact method."""
    plain = {key: value for key, value in request.items() if key not in NEUTRAL}
    built = build_decoder(request["decoder"])
    assert isinstance(built, Decoder)
    return {**plain, "decoder": built.plain} if is_exact(request) else plain


class Player:
    """Plays one scenario on one engine."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.failures: list[Failure] = []
        self.finished: Counter[str] = Counter()
        self.requests: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.taken: dict[int, str] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.left: set[int] = set()

    def fail(self, kind: str, number: int | None, detail: str = "") -> None:
        decoder = "" if number is None else self.scenario.requests[number]["decoder"]
        about = "" if number is None else f"{self.scenario.requests[number]}\n"
        self.failures.append(Failure(kind, decoder.partition(":")[0], f"{about}{detail}"))

    def play(self) -> list[Failure]:
        options = dict(self.scenario.engine)
        cost = options.pop("cost", 0)
        try:
            llm = world(self.scenario.world).open(**options)
        except AnydecodeError as error:
            check_message(error)
            return []
        with llm:
            if cost == 1:
                llm.cost_model = FixedCosts(lambda rows, _: 1e-6 * (1 + 0.01 * rows))
            if cost == 2:
                llm.cost_model = BatchCosts(lambda rows, _: 1e-3 * (1 + 0.002 * rows**2), llm)
            try:
                self._run(llm)
                self._compare()
                self._check_engine(llm)
            except Exception as error:
                lines = traceback.format_exception(error)
                self.fail(f"engine: {type(error).__name__}", None, "".join(lines[-6:]))
        return self.failures

    def _run(self, llm: LLM) -> None:
        for kind, number in self.scenario.events:
            if kind == "start":
                self._start(llm, number)
            elif kind == "steps":
                self._advance(llm, number)
            elif kind == "cancel" and number in self.requests:
                if not self.requests[number].done:
                    self.cancelled.add(number)
                    llm.abandon(self.requests[number])
                    self._check_cancelled(number)
            elif kind == "preempt" and llm.engine.running:
                running = llm.engine.running
                llm.engine.preempt(running[number % len(running)])
            elif kind == "clear":
                llm.clear()
            self._take()
        self._advance(llm, MAX_STEPS)
        for number in sorted(self.left):
            self.fail("endless", number)
        llm.driver.advance(lambda: bool(self.left) or not llm.engine.has_work)
        self._take()

    def _start(self, llm: LLM, number: int) -> None:
        request = self.scenario.requests[number]
        try:
            one = llm.request(**resolved(request))
        except AnydecodeError as error:
            check_message(error)
            self.outcomes[number] = "refused", str(error)
            return
        except Exception as error:
            lines = traceback.format_exception(error)
            self.fail(f"request: {type(error).__name__}", number, "".join(lines[-5:]))
            return
        llm.start(one, background=False)
        self.requests[number] = one
        self.taken[number] = ""
        self.left.add(number)

    def _advance(self, llm: LLM, count: int) -> None:
        steps = iter(range(count))
        llm.driver.advance(lambda: not self._has_left() or next(steps, None) is None)

    def _has_left(self) -> bool:
        for number in [number for number in self.left if self.requests[number].done]:
            self.left.discard(number)
            if number not in self.cancelled:
                self._end(number)
        return bool(self.left)

    def _take(self) -> None:
        for number, request in self.requests.items():
            if len(request.jobs) == 1:
                self.taken[number] += request.take_text()

    def _end(self, number: int) -> None:
        """Record what a request has returned."""
        request, one = self.scenario.requests[number], self.requests[number]
        found = self.outcomes[number] = outcome_of(one)
        self.finished[request["decoder"].partition(":")[0]] += 1
        if found[0] == "texts" and len(one.jobs) == 1:
            text = found[1][0][0][2]
            taken = self.taken[number] = self.taken[number] + one.take_text()
            if taken != text:
                self.fail("stream", number, f"{taken!r} instead of {text!r}")

    def _compare(self) -> None:
        """Compare all requests with the same alone. Only when no pass runs any more: the engines
        have the same models."""
        for number, found in self.outcomes.items():
            request = self.scenario.requests[number]
            if found[0] in ("exception", "refused late"):
                self.fail(f"{found[0]}: {found[1].splitlines()[0]}", number, found[1])
                continue
            if found[0] == "error" and "\n" in found[1]:
                self.fail("error of several lines", number, found[1])
            if "segment" in request and found[0] != "refused":
                continue
            exact = found[0] == "refused" or is_exact(request)
            if not exact and "prediction" in request:
                continue  # where the text depends on the drafts, it does on a prediction
            expected = self._expected(number)
            if found != expected:
                self.fail(f"{found[0]} instead of {expected[0]}", number, f"{found}\n{expected}")

    def _expected(self, number: int) -> Outcome:
        request = self.scenario.requests[number]
        other = request if self.outcomes[number][0] == "refused" else compared_with(request)
        return alone(self.scenario.world, self.scenario.engine, other)

    def _check_cancelled(self, number: int) -> None:
        one = self.requests[number]
        self.left.discard(number)
        if not one.done:
            self.fail("not cancelled", number)

    def _check_engine(self, llm: LLM) -> None:
        engine = llm.engine
        engine.check_integrity()
        counts = {
            "running": engine.running,
            "waiting": engine.waiting,
            "owners": engine._owners,
            "held": engine._held,
            "incomplete": engine._incomplete,
            "ended": engine._ended,
            **{f"requests of {runner.name}": runner.waiting for runner in engine._streams},
        }
        for name, found in counts.items():
            if found:
                self.fail(f"left: {name}", None, repr(found)[:300])
        for runner in engine.runners.values():
            tables = runner.prefixes.referenced_slots()
            num_cached = len({slot for table in tables for slot in table.tolist() if slot >= 0})
            if runner.pool.num_used != num_cached:
                self.fail("left: slots", None, f"{runner.pool.num_used} instead of {num_cached}")
        alive = [weakref.ref(job.sequence) for one in self.requests.values() for job in one.jobs]
        self.requests.clear()
        llm.generate("a", max_tokens=1)  # a schedule may remember its last pass
        gc.collect()
        held = sum(one() is not None for one in alive)
        if held:
            self.fail("left: sequences", None, f"{held} of {len(alive)}")


def play(scenario: Scenario) -> tuple[list[Failure], Counter[str]]:
    """Play a scenario. Returns what failed, and the number of finished requests by decoder."""
    player = Player(scenario)
    return player.play(), player.finished


def shrunk(scenario: Scenario, failure: Failure, seconds: float = 60) -> Scenario:
    """The smallest scenario found that fails in the same way."""
    end = time.process_time() + seconds

    def fails(one: Scenario) -> bool:
        return time.process_time() < end and failure in play(one)[0]

    smaller = True
    while smaller and time.process_time() < end:
        smaller = False
        for one in _simpler(scenario):
            if fails(one):
                scenario, smaller = one, True
                break
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    requests, events = scenario.requests, scenario.events
    for drop in range(len(requests)):
        kept = [
            (kind, number - (number > drop) if kind in ("start", "cancel") else number)
            for kind, number in events
            if kind not in ("start", "cancel") or number != drop
        ]
        yield replace(scenario, requests=requests[:drop] + requests[drop + 1 :], events=kept)
    for i, (kind, number) in enumerate(events):
        if kind != "start":
            yield replace(scenario, events=events[:i] + events[i + 1 :])
            if kind == "steps" and number > 1:
                yield replace(scenario, events=[*events[:i], (kind, number // 2), *events[i + 1 :]])
    for name in scenario.engine:
        if name != "cache_positions":
            rest = {key: value for key, value in scenario.engine.items() if key != name}
            yield replace(scenario, engine=rest)
    for i, request in enumerate(requests):
        for name in request:
            if name not in ("prompt", "decoder", "max_tokens", "seed", "temperature"):
                rest = {key: value for key, value in request.items() if key != name}
                yield replace(scenario, requests=[*requests[:i], rest, *requests[i + 1 :]])
        smaller: dict[str, Any] = {}
        if request["max_tokens"] > 1:
            smaller["max_tokens"] = request["max_tokens"] // 2
        if len(request["prompt"]) > 1:
            smaller["prompt"] = request["prompt"][: len(request["prompt"]) // 2]
        if ":" in request["decoder"]:
            smaller["decoder"] = request["decoder"].partition(":")[0]
        if request["temperature"]:
            smaller["temperature"] = 0.0
        for name, value in smaller.items():
            changed = {**request, name: value}
            yield replace(scenario, requests=[*requests[:i], changed, *requests[i + 1 :]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--decoders", default="")
    parser.add_argument("--scenario")
    given = parser.parse_args()
    logging.getLogger("anydecode").setLevel(logging.CRITICAL + 1)
    if given.scenario:
        parts = ast.literal_eval(given.scenario)
        for failure in play(Scenario(**parts))[0]:
            print(failure.kind, failure.detail, flush=True)
        return
    keys = [key for key in given.decoders.split(",") if key]
    gc.freeze()  # each scenario collects what is left of it
    end, seed, finished = time.process_time() + given.seconds, given.seed, Counter[str]()
    found: Counter[Failure] = Counter()
    while time.process_time() < end:
        scenario = random_scenario(Random(seed), given.worlds.split(","), keys)
        failures, counts = play(scenario)
        finished += counts
        for failure in failures:
            found[failure] += 1
            if found[failure] == 1:
                small = shrunk(scenario, failure)
                details = [one.detail for one in play(small)[0] if one == failure]
                print(f"seed {seed}, world {scenario.world}: {failure.kind} ({failure.decoder})")
                print(details[0] if details else failure.detail)
                print(f"--scenario {small.source()!r}\n", flush=True)
        seed += 1
    print(f"{seed - given.seed} scenarios, {finished.total()} requests of {len(finished)} methods")
    print(f"failures: {found.total()} of {len(found)} kinds")
    print(f"methods: {dict(finished)}")


if __name__ == "__main__":
    main()

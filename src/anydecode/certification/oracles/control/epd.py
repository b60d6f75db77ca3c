"""Oracle test of epd (EPD, arXiv:2501.05460). It compares the embeddings of images with another
implementation of the encoder, keys and values after a hand-over with a dense pass over these
embeddings, the text with that of one engine that gets them, and changes of roles with the paper's
rule in fractions."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.prefill.dense_pass import dense_pass, is_close
from anydecode.certification.oracles.transformer import softmax
from anydecode.certification.tiny import tiny_model
from anydecode.cluster.control.distserve import placements
from anydecode.cluster.control.roles import Group
from anydecode.cluster.fleet import Fleet, Part, SendTo, Task, WorkerFacts
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.simulation import Arrival, Link, WorkerPlan, simulate
from anydecode.cluster.worker import Worker
from anydecode.errors import FleetError
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.cost import CostTable
from anydecode.scoring.media import Media
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.sequence import TARGET

_SECRET = b"the secret of a certificate"
_HIDDEN, _PATCH, _WIDTH, _HEADS = 64, 8, 32, 4
_PROMPT = [40 + 7 * number % 90 for number in range(130)]
_STAGES = ("encode", "prefill", "decode")


@oracle_test("epd")
def epd() -> Iterator[Check]:
    """The stages one after the other, and changes between them."""
    yield from _encoder()
    yield from _stages()
    yield from _parts()
    yield from _switches()
    yield from _queues()
    yield from _allocations()


def _pixels(seed: int, height: int, width: int) -> np.ndarray:
    values = random.Random(seed)
    flat = [values.randrange(256) for _ in range(3 * height * width)]
    return np.array(flat, np.uint8).reshape(height, width, 3)


_IMAGES = [
    Media(5, _pixels(1, 32, 24)),
    Media(40, _pixels(2, 16, 16)),
    Media(52, _pixels(3, 40, 48)),
]


def _rows(pixels: np.ndarray) -> np.ndarray:
    """The embeddings of an image, patch by patch."""
    drawn = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        # Uniform in [-1, 1) in steps of 2^-20, with variance 1 / columns.
        values: np.ndarray = drawn.integers(-1048576, 1048576, (rows, columns)) / 1048576
        return values * np.sqrt(3 / columns)

    first = matrix(_WIDTH, 3 * _PATCH**2)
    layers = [
        [matrix(_WIDTH, _WIDTH) for _ in range(4)]
        + [matrix(2 * _WIDTH, _WIDTH), matrix(_WIDTH, 2 * _WIDTH)]
        for _ in range(2)
    ]
    last = matrix(_HIDDEN, _WIDTH)
    states = []
    for top in range(0, pixels.shape[0], _PATCH):
        for left in range(0, pixels.shape[1], _PATCH):
            patch = pixels[top : top + _PATCH, left : left + _PATCH].astype(float).ravel()
            angles = [
                place / 2**power
                for place in (top // _PATCH, left // _PATCH)
                for power in range(_WIDTH // 4)
            ]
            states.append(first @ (patch / 127.5 - 1) + [*np.sin(angles), *np.cos(angles)])
    state = np.array(states)
    for query, key, value, output, up, down in layers:
        normed, mixed = _unit(state), []
        for head in np.split(np.arange(_WIDTH), _HEADS):
            q, k, v = (normed @ one[head].T for one in (query, key, value))
            mixed.append(softmax(q @ k.T / np.sqrt(len(head))) @ v)
        state = state + np.concatenate(mixed, 1) @ output.T
        state = state + np.maximum(_unit(state) @ up.T, 0) @ down.T
    embeddings: np.ndarray = _unit(state) @ last.T
    return embeddings


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = rows / np.sqrt(np.mean(rows**2, 1, keepdims=True) + 1e-6)
    return unit


def _encoder() -> Iterator[Check]:
    encoder = PatchEncoder(_HIDDEN)
    for media in _IMAGES:
        found, expected = encoder.encode(media.pixels), _rows(media.pixels)
        name = f"embeddings of {media.pixels.shape[0]} x {media.pixels.shape[1]} pixels"
        is_near = found.shape == expected.shape and bool(np.abs(found - expected).max() < 1e-5)
        yield Check(name, is_near)
    wide, high = (Media(0, _pixels(1, *size).reshape(size + (3,))) for size in ((16, 24), (24, 16)))
    is_equal = wide.pixels.tobytes() == high.pixels.tobytes()
    differ = wide.key(encoder) != high.key(encoder)
    yield Check("equal bytes of another shape are another image", is_equal and differ)


def _stages() -> Iterator[Check]:
    """A fleet of two encode workers, a prefill and a decode worker."""
    encoder, model = PatchEncoder(_HIDDEN), tiny_model()
    given = [PromptEmbeds(one.first, encoder.encode(one.pixels)) for one in _IMAGES]
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 1.0, "seed": 3, "logprobs": 2}
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        alone = llm.generate(_PROMPT, prompt_embeds=given, **options)
    with _fleet("encode", "encode", "prefill", "decode") as (fleet, workers):
        tasks = _submitted(fleet)
        found = fleet.generate(_PROMPT, prompt_embeds=_IMAGES, **options)
        parts = sorted(tasks[0].parts, key=lambda one: one.number)
        sizes = [one.num_rows for one in parts]
        yield Check("the largest image goes first", sizes == [30, 12, 4], str(sizes))
        is_same = (found.tokens, found.logprobs) == (alone.tokens, alone.logprobs)
        yield Check("the text of one engine with the same embeddings", is_same)
        counts = fleet.status()["counts"]
        numbers = [one.media.num_encoded for one in workers]
        is_staged = sum(numbers[:2]) == len(_IMAGES) and min(numbers[:2]) and not any(numbers[2:])
        detail = f"{numbers} images, {counts}"
        yield Check("both encode workers encode, and no other", bool(is_staged), detail)
        yield Check("keys and values are handed over", counts["handovers"] == 1, detail)
        namespace = fleet.request(_PROMPT, prompt_embeds=_IMAGES).namespace
        rows = model.embed(np.array(_PROMPT)).astype(np.float64)
        for one in _IMAGES:
            own = _rows(one.pixels)
            rows[one.first : one.first + len(own)] = own
        seen = {layer: np.arange(len(rows)) for layer in range(model.spec.num_layers)}
        _, keys, values, _ = dense_pass(model, rows, seen)
        runner = workers[3].llm.engine.runners[TARGET]
        slots = runner.prefixes.match(_PROMPT, (-1, namespace))
        cache, count = runner.pool.cache, len(slots)
        pairs = [*zip(cache.keys, keys, strict=True), *zip(cache.values, values, strict=True)]
        is_near = count == 128 and all(
            is_close(np.asarray(stored[slots], np.float64), expected[:count])
            for stored, expected in pairs
        )
        yield Check("keys and values at the decode worker", is_near, f"{count} positions")
        other = [*_IMAGES[:2], Media(52, _pixels(4, 40, 48))]
        found = fleet.generate(_PROMPT, prompt_embeds=other, **options)
        yield Check(
            "another image of the same size is another text",
            found.logprobs != alone.logprobs,
        )
        before = fleet.status()["counts"]["encodings"]
        fleet.generate(_PROMPT, max_tokens=2)
        after = fleet.status()["counts"]["encodings"]
        yield Check("a prompt without images visits no encode worker", before == after)


def _submitted(fleet: FleetLLM) -> list[Task]:
    """The tasks that the fleet gets from now on."""
    state, tasks = fleet.driver.fleet, list[Task]()

    def submit(task: Task, now: float, add: Any = state.submit) -> None:
        tasks.append(task)
        add(task, now)

    state.submit = submit  # type: ignore[method-assign]
    return tasks


@contextmanager
def _fleet(*roles: str) -> Iterator[tuple[FleetLLM, list[Worker]]]:
    options: dict[str, Any] = {"cache_positions": 512, "threads": 1}

    def work(worker: Worker, port: int) -> None:
        try:
            asyncio.run(worker.run("127.0.0.1", port))
        except FleetError:
            worker.llm.close()

    with ExitStack() as stack:
        fleet = FleetLLM(tiny_model(), _SECRET, tokenizer=ByteTokenizer(), **options)
        workers = []
        for number, role in enumerate(roles):
            llm = LLM(tiny_model(), tokenizer=ByteTokenizer(), **options)
            worker = Worker(llm, _SECRET, name=f"{role}-{number}", role=role, patience=0)
            thread = threading.Thread(target=work, args=(worker, fleet.fleet_port), daemon=True)
            thread.start()
            stack.callback(thread.join)
            workers.append(worker)
        stack.callback(fleet.close)
        while len(fleet.status()["workers"]) < len(roles):
            time.sleep(0.01)
        yield fleet, workers


def _parts() -> Iterator[Check]:
    """The images of one prompt go to all encode workers. They may be encoded in any order, and the
    prompt begins when the last one is encoded."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        fleet = Fleet(catalogue.build("epd"))
        for name, role in (("a", "encode"), ("b", "encode"), ("m", "mixed")):
            fleet.join(WorkerFacts(name, name, role, "g", (name, 1), 4, 1000), 0.0)
        parts = [Part(number, [], 0, {}, num_rows=1) for number in range(3)]
        fleet.submit(Task(9, [1] * 20, 5, {"options": {}}, parts=parts), 0.0)
        sent = {frame["task"]: name for name, frame in _sent(fleet)}
        yield Check(
            f"three images at two workers, encoded in the order {order}",
            sorted(sent) == [0, 1, 2] and set(sent.values()) == {"a", "b"},
            str(sent),
        )
        begun = []
        for number in order:
            offered = {"type": "offered", "task": number, "attempt": 0, "is_kept": True}
            for frame in (offered, offered):  # the second one changes nothing
                fleet.receive(sent[number], frame, 0.0)
            begun.append([frame for name, frame in _sent(fleet) if name == "m"])
        sources = begun[2][0]["encoded"] if begun[2] else []
        expected = [([sent[number], 1], number, 0) for number in range(3)]
        found = [(one["address"], one["task"], one["attempt"]) for one in sources]
        name = f"the prompt begins after the last of {order}"
        yield Check(name, begun[:2] == [[], []] and found == expected, str(begun))
        tokens = {"type": "tokens", "task": 9, "attempt": 0, "start": 0, "tokens": [1]}
        fleet.receive("m", {**tokens, "logprobs": None}, 1.0)
        ended = [(name, frame["type"], frame["task"]) for name, frame in _sent(fleet)]
        expected_ends = [(sent[number], "cancel", number) for number in range(3)]
        name = f"the embeddings are freed at the first token, {order}"
        yield Check(name, ended == expected_ends, str(ended))


def _sent(fleet: Fleet) -> list[tuple[str, dict[str, Any]]]:
    sent = [one for one in fleet.actions if isinstance(one, SendTo)]
    fleet.actions.clear()
    return [(one.incarnation, one.frame) for one in sent]


def _switches() -> Iterator[Check]:
    """Queues that change every second, for 60 seconds: the changes are those of the rule."""
    for seed in range(40):
        values = random.Random(seed)
        numbers = {stage: values.randint(1, 4) for stage in _STAGES}
        control, sums = catalogue.build("epd"), dict.fromkeys(_STAGES, Fraction(0))
        count, problems = 0, []
        scale = {stage: values.choice((1, 3, 9)) for stage in _STAGES}
        for second in range(60):
            waiting = {stage: values.randint(0, scale[stage]) for stage in _STAGES}
            group = Group(numbers["prefill"], numbers["decode"], numbers["encode"], waiting)
            changes = control.step(float(second), [group], 1, 1)
            count += 1
            for stage in _STAGES:
                sums[stage] += waiting[stage]
            expected = []
            if second and second % 5 == 0:
                expected = _changes(numbers, {one: sums[one] / count for one in _STAGES})
                count, sums = 0, dict.fromkeys(_STAGES, Fraction(0))
            found = [(one.source[1], one.target[1]) for one in changes]
            if found != expected:
                problems.append((second, found, expected))
            for giver, receiver in expected:
                numbers[giver] -= 1
                numbers[receiver] += 1
        yield Check(f"changes of roles, load {seed}", not problems, str(problems[:1]))


def _queues() -> Iterator[Check]:
    """One encode worker has two images, and six wait. After 5 seconds one of three prefill workers
    becomes an encode worker and begins with two of the six."""
    fleet = Fleet(catalogue.build("epd"))
    names = ("encode-1", "prefill-1", "prefill-2", "prefill-3", "decode")
    for name in names:
        role = name.partition("-")[0]
        fleet.join(WorkerFacts(name, name, role, "g", (name, 1), 4, 1000), 0.0)
    for number in range(8):
        part = Part(10 + number, [], 0, {}, num_rows=1)
        fleet.submit(Task(number, [1] * 20, 5, {"options": {}}, parts=[part]), 0.0)
    begun = [(name, frame["task"]) for name, frame in _sent(fleet)]
    beat = {"type": "beat", "seen": 0, "tasks": [], "leases": [], "passes": 0}
    for half in range(11):
        for name in names:
            fleet.receive(name, beat, half / 2)
        fleet.tick(half / 2)
        roles = [one.role for one in fleet.members.values()]
        expected = ["encode", "encode" if half == 10 else "prefill", *["prefill"] * 2, "decode"]
        yield Check(f"roles after {half / 2} s of waiting images", roles == expected, str(roles))
    begun += [(name, one["task"]) for name, one in _sent(fleet) if one["type"] == "encode"]
    expected_parts = [("encode-1", 10), ("encode-1", 11), ("prefill-1", 12), ("prefill-1", 13)]
    yield Check("the images go to both workers", begun == expected_parts, str(begun))


def _changes(numbers: dict[str, int], queues: dict[str, Fraction]) -> list[tuple[str, str]]:
    """The changes by the rule: the stage with the longest queue (the first of equal ones) gets a
    worker. It comes from a stage with two workers or more whose queue is shorter than half of the
    longest; of several such stages, from the one with the most workers, then the one with the
    shortest queue."""
    receiver = sorted(_STAGES, key=lambda one: (-queues[one], _STAGES.index(one)))[0]
    givers = [one for one in _STAGES if 2 * queues[one] < queues[receiver] and numbers[one] >= 2]
    givers.sort(key=lambda one: (-numbers[one], queues[one], _STAGES.index(one)))
    return [(givers[0], receiver)] if givers else []


def _allocations() -> Iterator[Check]:
    """The planner chooses from all allocations. A simulated prompt has its first token when all
    encode workers have encoded its images, their embeddings are transferred, and its pass is over.
    """
    for workers in range(1, 6):
        found = [
            (one.encode, one.mixed, one.prefill, one.decode) for one in placements(workers, True)
        ]
        expected = {
            one
            for one in product(range(workers + 1), repeat=4)
            if sum(one) == workers and (one[2:] == (0, 0) if one[1] else min(one[2:]) > 0)
        }
        is_all = len(found) == len(expected) and set(found) == expected
        yield Check(f"all allocations of {workers} workers", is_all, str(found))
    costs = CostTable({256: {1: 0.25, 512: 0.25}})  # each pass takes a quarter of a second
    link = Link(bytes_per_second=64.0, latency=0.125, embedding_bytes=2)
    for encode, images in ((1, (8, 8, 8)), (2, (8, 8, 8)), (3, (8, 8, 8)), (2, (16, 4, 4))):
        plans = [WorkerPlan("encode", costs, encode_seconds=0.125)] * encode
        arrival = Arrival(0.0, [1] * (1 + sum(images)), 1, images=images)
        result = simulate([arrival], [*plans, WorkerPlan("mixed", costs)], link)
        busy = [Fraction(0)] * encode
        for rows in images:  # the largest first
            busy[busy.index(min(busy))] += Fraction(rows, 8)
        seconds = max(busy) + Fraction(1, 8) + Fraction(2 * max(images), 64) + Fraction(1, 4)
        first = result.served[0].first_token_seconds
        name = f"images of {images} embeddings at {encode} encode workers"
        yield Check(name, abs(first - seconds) < 1e-9, f"{first} s instead of {seconds}")

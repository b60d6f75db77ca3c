"""Oracle test of step-3 (Step-3, arXiv:2507.19427). It compares tokens and logits of two processes
with those of one and with another forward pass of a Step-3 model, the exchange with its schedule
by rule, micro-batches with what each row reads, and the formulas with results by hand and with sums
in fractions."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.families.step3 import Forward
from anydecode.certification.tiny_step3 import LAYERS, step3_checkpoint
from anydecode.cluster.afd import Instance, SplitCosts, split_costs, split_size
from anydecode.cluster.ffn import AttentionExecutor, FfnClient, FfnServer
from anydecode.errors import FleetError
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.models.families import load_network
from anydecode.models.ffn_split import micro_batches
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer

_SECRET = b"the secret of a certificate"
_MODEL = "tiny-autoregressive"
_PROMPTS = [[65 + (5 * n + 3 * i) % 26 for i in range(6 + 17 * n)] for n in range(5)]
_OPTIONS: dict[str, Any] = {
    "max_tokens": 20, "temperature": 1.0, "seed": 11, "ignore_eos": True, "logprobs": 2,
}  # fmt: skip
_LOADING: dict[str, Any] = {"threads": 2, "draft": "none", "row_budget": 48}
_TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7, 101, 5, 17]


@oracle_test("step-3")
def step_3() -> Iterator[Check]:
    """Two processes, the model's forward pass, the exchange, and the micro-batches."""
    yield from _processes()
    yield _refusal()
    yield _logits()
    yield _states()
    yield _quantized()
    yield from _exchange()
    yield from _cuts()
    yield _published()
    yield _counted()
    yield _instances()


def _answers(llm: LLM) -> list[Any]:
    found = llm.generate(_PROMPTS, **_OPTIONS)
    return [(one.tokens, repr(one.logprobs)) for one in found]


def _processes() -> Iterator[Check]:
    """The default build against one process, also when its FFN process is killed."""
    with LLM(_MODEL, **_LOADING) as llm:
        expected = _answers(llm)
    method = catalogue.build("step-3")
    with LLM(_MODEL, split=method, **_LOADING) as llm:
        found = _answers(llm)
        (local,) = method.local
        first = local.process_id
        yield Check(
            "tokens and log-probabilities are those of one process", found == expected and first
            is not None, f"process {'missing' if first is None else 'started'}",
        )  # fmt: skip
        if first is None:
            return
        runs, run = 0, llm.model.run

        def killing(rows: Rows, cache: Any, output_spec: OutputSpec) -> Any:
            nonlocal runs
            runs += 1
            if runs == 4 and local.process_id is not None:
                os.kill(local.process_id, signal.SIGKILL)
            return run(rows, cache, output_spec)

        llm.model.run = killing  # type: ignore[method-assign]
        found = _answers(llm)
        is_new = local.process_id not in (None, first)
        yield Check(
            "a killed FFN process changes nothing", found == expected and is_new,
            f"{runs} passes, {'a' if is_new else 'no'} new process",
        )  # fmt: skip
    yield Check("the FFN process ends with the model", local.process_id is None, "after close()")


def _refusal() -> Check:
    """Attention and FFNs of models that differ in their weights alone."""
    try:
        with split_model(seed=0, ffn_seed=1):
            message = "it is not refused"
    except FleetError as error:
        message = str(error)
    name = "an FFN process of another model is refused"
    return Check(name, "has another model" in message, message)


class _Recorded:
    """A client whose calls are recorded: S and R, with the layer and the number of rows."""

    def __init__(self, client: FfnClient) -> None:
        self.client, self.calls = client, list[tuple[str, int, int]]()
        self.connect, self.close = client.connect, client.close

    def send(self, layer: int, x: np.ndarray) -> None:
        self.calls.append(("S", layer, len(x)))
        self.client.send(layer, x)

    def receive(self, layer: int, count: int) -> np.ndarray:
        self.calls.append(("R", layer, count))
        return self.client.receive(layer, count)


@contextmanager
def split_networks(
    network: Network, ffns: Network
) -> Iterator[tuple[Transformer, _Recorded, list[tuple[int, int]]]]:
    """A model whose FFNs run behind a connection, with those of `ffns`; with the calls of the
    client, and the layers and rows that the server has computed."""
    server = FfnServer(ffns, _make, _SECRET, "tiny")
    computed: list[tuple[int, int]] = []
    compute = server.compute

    def counted(x: np.ndarray, layer: int) -> np.ndarray:
        computed.append((layer, len(x)))
        return compute(x, layer)

    server.compute = counted  # type: ignore[method-assign]
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    serving = server.serve("127.0.0.1", 0, ports.put, is_single=True)
    thread = threading.Thread(target=lambda: asyncio.run(serving), daemon=True)
    thread.start()
    place = ("127.0.0.1", ports.get(timeout=60), _SECRET)
    recorded: list[_Recorded] = []

    def connect(facts: dict[str, Any], hidden: int) -> Any:
        recorded.append(_Recorded(FfnClient(lambda: place, facts, hidden)))
        return recorded[0]

    count = catalogue.build("step-3").micro_batches
    try:
        model = Transformer(
            network, name="tiny", executor=lambda one: AttentionExecutor(one, _make, connect, count)
        )
        yield model, recorded[0], computed
    finally:
        for one in recorded:
            one.close()
        thread.join(60)


@contextmanager
def split_model(
    seed: int, ffn_seed: int | None = None
) -> Iterator[tuple[Transformer, _Recorded, list[tuple[int, int]]]]:
    """A tiny Step-3 model as `split_networks`. The FFNs may be those of another model."""
    seeds = (seed, seed if ffn_seed is None else ffn_seed)
    with split_networks(*(load_network(step3_checkpoint(one)) for one in seeds)) as found:
        yield found


def _make(network: Network) -> Any:
    make: Callable[..., Any] = choose_executor(None, 1)
    return make(network)


def _text_rows(tokens: list[int], layers: int) -> Rows:
    count = len(tokens)
    places, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    empty = np.empty(0, np.int32)
    return Rows(
        np.array(tokens, np.int32), places, places, [places], zeros, places + 1, empty, zeros,
        zeros, zeros, np.full(count, layers, np.int32),
    )  # fmt: skip


def _logits() -> Check:
    """Multi-matrix factorization attention and experts, apart, against one forward pass."""
    with split_model(seed=6) as (model, _, _):
        every = np.arange(len(_TEXT), dtype=np.int32)
        output = model.run(_text_rows(_TEXT, LAYERS), model.new_cache(64), OutputSpec(every))
        found = np.array(output.logits)
    expected = Forward(step3_checkpoint(6)).logits(_TEXT)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    name = "logits of a Step-3 model are those of another forward pass"
    return Check(name, error < 1e-4, f"largest relative difference {error:.1e}")


def _states() -> Check:
    """Rows that end before the last layer, and one that starts behind the first with a state."""
    count, hidden = len(_TEXT), step3_checkpoint().config["text_config"]["hidden_size"]
    whole = _text_rows(_TEXT, LAYERS)
    start, stop = whole.start.copy(), whole.stop.copy()
    tokens = whole.tokens.copy()
    inputs = np.random.default_rng(1).standard_normal((count, hidden), np.float32)
    tokens[-4], start[-4] = -1, 1
    stop[-3:] = [LAYERS - 1, LAYERS - 1, 1]
    rows = replace(whole, tokens=tokens, start=start, stop=stop, inputs=inputs)
    depths = {
        depth: np.flatnonzero((start <= depth) & (stop >= depth)).astype(np.int32)
        for depth in range(LAYERS + 1)
    }
    spec = OutputSpec(np.flatnonzero(stop == LAYERS).astype(np.int32), depths)
    one = Transformer(load_network(step3_checkpoint(6)), executor=_make)
    expected = one.run(rows, one.new_cache(64), spec)
    with split_model(seed=6) as (model, _, _):
        found = model.run(rows, model.new_cache(64), spec)
    different = [
        f"after {depth} layers" for depth in depths
        if not np.array_equal(found.hidden[depth], expected.hidden[depth])
    ]  # fmt: skip
    different += [] if np.array_equal(found.logits, expected.logits) else ["logits"]
    name = "hidden states of every depth have the bits of one process"
    return Check(name, not different, f"different: {', '.join(different) or 'nothing'}")


def _quantized() -> Check:
    """FFNs in 8 bits beside attention in floating point, whose cache has 16 bits in one process."""

    def mixed() -> Network:
        floats, quantised = (
            load_network(load_checkpoint(_MODEL), dtype) for dtype in ("float32", "int8")
        )
        pairs = zip(floats.weights.layers, quantised.weights.layers, strict=True)
        layers = [replace(first, mlp=second.mlp) for first, second in pairs]
        return Network(floats.spec, replace(floats.weights, layers=layers))

    whole = Transformer(mixed(), executor=_make)
    with split_networks(mixed(), mixed()) as (model, _, _):
        every = np.arange(len(_TEXT), dtype=np.int32)
        rows, output_spec = _text_rows(_TEXT, model.spec.num_layers), OutputSpec(every)
        caches = [one.new_cache(64) for one in (whole, model)]
        first, second = (
            one.run(rows, cache, output_spec).logits
            for one, cache in zip((whole, model), caches, strict=True)
        )
    return Check(
        "quantised FFNs beside other attention give the bits of one process",
        caches[0].format == caches[1].format and np.array_equal(first, second),
        f"caches in {caches[0].format} and {caches[1].format}",
    )


def _exchange() -> Iterator[Check]:
    """What is sent when, with five sequences that decode."""
    with split_model(seed=2) as (model, recorded, computed):
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) as llm:
            llm.generate(_PROMPTS, max_tokens=6, ignore_eos=True)
        calls = list(recorded.calls)
    passes, start = [], 0
    for at, (kind, layer, _) in enumerate(calls):
        is_last = kind == "R" and layer == LAYERS - 1
        if is_last and (at + 1 == len(calls) or calls[at + 1][0] == "S"):
            passes.append(calls[start : at + 1])
            start = at + 1
    largest, is_in_order = 0, True
    for one in passes:
        parts = [rows for kind, layer, rows in one if kind == "S" and layer == 0]
        # All first layers, then each part's states come back before its next layer leaves.
        rule = [("S", 0, rows) for rows in parts]
        for layer in range(1, LAYERS):
            for rows in parts:
                rule += [("R", layer - 1, rows), ("S", layer, rows)]
        rule += [("R", LAYERS - 1, rows) for rows in parts]
        is_in_order &= one == rule
        largest = max(largest, len(parts))
    yield Check(
        "three micro-batches are on their way at a time",
        is_in_order and largest == 3,
        f"{len(passes)} passes, up to {largest} parts",
    )
    sent = [sum(rows for kind, at, rows in calls if kind == "S" and at == n) for n in range(LAYERS)]
    done = [sum(rows for at, rows in computed if at == n) for n in range(LAYERS)]
    yield Check(
        "the FFN process computes each row of each layer once",
        sent == done and len(set(sent)) == 1 and sent[0] > 0,
        f"rows per layer: sent {sent}, computed {done}",
    )


def _cuts() -> Iterator[Check]:
    """Random passes: rows of texts and trees, some of which see each other."""
    draw, num_cut, num_wrong, num_uneven = random.Random(5), 0, 0, 0
    for _ in range(200):
        rows, reads = _random_pass(draw)
        active = np.arange(len(rows))
        parts = micro_batches(rows, active, 3, 256)
        slots = rows.slots.tolist()
        for number, part in enumerate(parts):
            later = {slots[row] for other in parts[number + 1 :] for row in other.tolist()}
            num_wrong += any(reads[row] & later for row in part.tolist())
        free = [
            cut for cut in range(1, len(slots))
            if not set().union(*reads[:cut]) & set(slots[cut:])
        ]  # fmt: skip
        num_wrong += np.concatenate(parts).tolist() != active.tolist()
        thirds = [Fraction(len(slots) * part, 3) for part in (1, 2)]
        nearest = {min(free, key=lambda cut: abs(cut - third)) for third in thirds if free}
        num_uneven += {int(part[0]) for part in parts} != {0, *nearest}
        num_cut += len(parts) > 1
    yield Check(
        "no row reads what a later micro-batch stores",
        num_wrong == 0 and num_cut > 50,
        f"{num_cut} of 200 passes divided, {num_wrong} wrongly",
    )
    yield Check(
        "micro-batches are as equal as their rows allow",
        num_uneven == 0,
        f"{num_uneven} of 200 passes are divided elsewhere than next to thirds",
    )


def _random_pass(draw: random.Random) -> tuple[Rows, list[set[int]]]:
    """Rows of several sequences, and the slots that each reads."""
    free = list(range(256))
    draw.shuffle(free)
    tables, columns, reads, tails = [], [], [], list[int]()
    for sequence in range(draw.randint(1, 5)):
        past, new = draw.randint(0, 12), draw.randint(1, 6)
        table = [free.pop() for _ in range(past + new)]
        kind = draw.choice(["causal", "both", "tree"])
        for place in range(past, past + new):
            prefix = {"causal": place + 1, "both": past + new, "tree": past}[kind]
            own = [table[place]] if kind == "tree" else []
            own += [table[draw.randint(past, place)]] if kind == "tree" else []
            columns.append((place, table[place], sequence, prefix, len(tails), len(own)))
            reads.append({*table[:prefix], *own})
            tails += own
        if draw.random() < 0.3:
            table[0] = -1 if past else table[0]
        tables.append(np.array(table, np.int32))
    places, slots, table_of, prefixes, starts, lengths = np.array(columns, np.int32).T
    zeros = np.zeros(len(columns), np.int32)
    rows = Rows(
        zeros, places, slots, tables, table_of, prefixes, np.array(tails, np.int32), starts,
        lengths, zeros, zeros + 1,
    )  # fmt: skip
    return rows, reads


def _published() -> Check:
    """Step-3 with 8-bit weights and cache, within 50 ms per token at 4,096 positions, on a machine
    of eight H800 with eight networks of 400 Gbit/s. The results were computed by hand."""
    layers, hidden, heads, dim, rank, inner = 61, 7168, 64, 256, 2048, 5120
    attention = hidden * (rank + 2 * dim) + rank * heads * dim + heads * dim * hidden
    expert = 3 * hidden * inner
    costs = SplitCosts(
        layers, hidden, layers * 4 * heads * dim * 4096, layers * 2 * dim * 4096,
        layers * attention, layers * attention, layers * 4 * expert, layers * 49 * expert,
        layers * 49 * expert, 3 / 48,
    )  # fmt: skip
    machine = Instance(8 * 1979e12, 8 * 3.35e12, 8 * 50e9)
    count = catalogue.build("step-3").micro_batches
    size = split_size(costs, machine, machine, 0.05, count, 3)
    expected = {"intensity": 128, "stage": 273e-6, "smallest share of experts": 0.058}
    found = dict(
        zip(expected, (costs.intensity, size.stage_seconds, size.min_sparsity), strict=True)
    )
    return Check(
        "the formulas give the results by hand for the published model on H800",
        all(abs(found[name] - one) < 0.01 * one for name, one in expected.items()),
        ", ".join(f"{name} {one:.3g}" for name, one in found.items()),
    )


def _counted() -> Check:
    """The costs of the tiny model, from the shapes of its tensors, with a window in one layer and a
    cache in 8 bits."""
    checkpoint, context, window = step3_checkpoint(), 100, 30
    text = checkpoint.config["text_config"]
    network = load_network(checkpoint)
    first, *others = network.spec.layers
    assert first.attention is not None
    first = replace(first, attention=replace(first.attention, window=window))
    network.spec = replace(network.spec, layers=(first, *others))
    found = split_costs(network, "tiny", context, 1)
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    matrices = {
        name: int(np.size(tensor)) for name, tensor in tensors.items()
        if ".layers." in name and np.ndim(tensor) > 1
    }  # fmt: skip
    attention = sum(size for name, size in matrices.items() if ".self_attn." in name)
    routed = sum(
        size for name, size in matrices.items() if ".moe." in name and "gate.w" not in name
    )
    dense = sum(matrices.values()) - attention - routed
    heads, dim, share = text["num_attention_heads"], text["head_dim"], Fraction(2, 6)
    positions = window + (LAYERS - 1) * context
    expected = SplitCosts(
        LAYERS, text["hidden_size"], 4 * heads * dim * positions, 2 * dim * positions,
        attention, 4 * attention, float(dense + share * routed), dense + routed,
        4 * (dense + routed), float(share),
    )  # fmt: skip
    differences = [
        name for name, one in vars(expected).items()
        if abs(getattr(found, name) - one) > 1e-9 * one
    ]  # fmt: skip
    detail = f"different: {', '.join(differences) or 'nothing'}"
    return Check("costs are those of the model's matrices", not differences, detail)


def _instances() -> Check:
    """The smallest numbers of instances that keep every stage within its time, counted up."""
    draw, num_wrong, largest = random.Random(3), 0, 0
    for _ in range(100):
        costs = SplitCosts(
            num_layers=draw.randint(1, 60),
            hidden_size=draw.randint(64, 8192),
            core_flops=draw.randint(1, 10**6),
            cache_bytes=draw.randint(1, 10**6),
            projections=(projections := draw.randint(1, 10**6)),
            projection_bytes=2 * projections,
            ffn_active=draw.randint(1, 10**5),
            ffn_entries=(entries := draw.randint(10**5, 10**6)),
            ffn_bytes=2 * entries,
            sparsity=draw.choice([1.0, 0.5, 0.0625]),
        )
        rates = [(draw.randint(10**9, 10**10), draw.randint(10**8, 10**9)) for _ in range(2)]
        first, second = (Instance(*rate, draw.randint(10**8, 10**9)) for rate in rates)
        tpot, count = draw.choice([0.02, 0.05, 0.3]), draw.randint(1, 4)
        size = split_size(costs, first, second, tpot, count, 3)
        expected = _counted_up(costs, [first, second], Fraction(tpot), count)
        num_wrong += (size.attention, size.ffn) != expected
        largest = max(largest, *(one or 0 for one in expected))
    name = "the numbers of instances are the smallest that keep the time per token"
    return Check(name, num_wrong == 0, f"{num_wrong} of 100 differ, up to {largest} instances")


def _counted_up(
    costs: SplitCosts, machines: list[Instance], tpot: Fraction, count: int
) -> tuple[int | None, int | None]:
    """Attention and FFN instances; None above 4,096 if no number can be enough."""
    stage = tpot / count / costs.num_layers
    first, second = (
        {name: Fraction(value) for name, value in vars(one).items()} for one in machines
    )
    state = 3 * costs.hidden_size
    enough = (
        second["flops"] * Fraction(costs.ffn_bytes, costs.ffn_entries) / second["bandwidth"] / 2
    )
    tokens = min(enough / Fraction(costs.sparsity), stage * second["network"] / state)

    def attention(number: int) -> Fraction:
        each = tokens / number
        core = max(
            each * Fraction(costs.core_flops) / first["flops"],
            each * Fraction(costs.cache_bytes) / first["bandwidth"],
        )
        products = max(
            each * 2 * costs.projections / first["flops"],
            Fraction(costs.projection_bytes) / first["bandwidth"],
        )
        return max((core + products) / costs.num_layers, each * state / first["network"])

    def ffn(number: int) -> Fraction:
        compute = tokens * 2 * Fraction(costs.ffn_active) / second["flops"]
        return max(compute, costs.ffn_bytes / second["bandwidth"]) / number / costs.num_layers

    found = [
        next((number for number in range(1, 4097) if seconds(number) <= stage), None)
        for seconds in (attention, ffn)
    ]
    return found[0], found[1]

"""Oracle test of stree (arXiv:2505.14969): the logits of tree nodes against the closed form of
accumulated transitions, the steps that a pass takes, the states that it keeps, and tree sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, Restarts, equal_tokens, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.state_trees import TreeOracle
from anydecode.certification.rounds import TracedRound, rounds
from anydecode.certification.tiny import readable_executor
from anydecode.certification.tiny_recurrent import (
    hybrid_checkpoint,
    mamba2_checkpoint,
    mamba_checkpoint,
)
from anydecode.kernels.host import to_host
from anydecode.kernels.recurrent import PassStates, Scan
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.scripted import ByteTokenizer

MODELS: dict[str, Callable[[], Checkpoint]] = {
    "Mamba": mamba_checkpoint,
    "Mamba-2": mamba2_checkpoint,
    "hybrid": hybrid_checkpoint,
}
PROMPT = "abacadabacbadcabdacebacabdabcabacd"
SIZE = 16


@oracle_test("stree")
def stree() -> Iterator[Check]:
    """Texts, logits, steps and states on three models, and the sizes of trees."""
    for name, make in MODELS.items():
        yield from _texts(name, make())
        yield from _trees(name, make())
    yield from _sizes()


def _open(checkpoint: Checkpoint) -> LLM:
    model = build_model(checkpoint, executor=readable_executor())
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048)


def _texts(name: str, checkpoint: Checkpoint) -> Iterator[Check]:
    """The texts of plain decoding: alone, in a batch and restarted."""
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {
            "max_tokens": 24, "temperature": temperature, "seed": 11, "ignore_eos": True,
        }  # fmt: skip
        where = f"{name}, T={temperature}"
        with _open(checkpoint) as llm:
            plain = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        with _open(checkpoint) as llm:
            alone = [llm.generate(p, decoder="stree", **options).tokens for p in PROMPTS]
            yield equal_tokens(f"equals plain decoding, {where}", alone, plain)
        with _open(checkpoint) as llm:
            batch = llm.generate(list(PROMPTS), decoder="stree", **options)
            yield equal_tokens(f"batched, {where}", [one.tokens for one in batch], plain)
        with _open(checkpoint) as llm, Restarts(llm.engine, seed=3):
            batch = llm.generate(list(PROMPTS), decoder="stree", **options)
            yield equal_tokens(f"restarted, {where}", [one.tokens for one in batch], plain)


@dataclass
class _Pass:
    """What one pass computed: the slots of each row's positions, whether it is a node of a tree,
    the rows with logits, the steps of its recurrences, and the states kept after it."""

    paths: list[list[int]]
    tokens: list[int]
    is_node: list[bool]
    rows: list[int]
    logits: np.ndarray
    steps: int = 0
    branches: int = 0
    num_states: int = 0


@contextmanager
def _recorded(llm: LLM) -> Iterator[list[_Pass]]:
    """The passes of the target that are run meanwhile."""
    model, found, scans = llm.engine.runners["target"].model, list[_Pass](), list[Scan]()
    run, scan = model.run, PassStates.scan

    def recording_scan(states: PassStates, active: np.ndarray) -> Scan:
        scans.append(scan(states, active))
        return scans[-1]

    def recording_run(rows: Any, cache: Any, spec: Any) -> Any:
        scans.clear()
        output = run(rows, cache, spec)
        paths = []
        for row in range(len(rows)):
            first = rows.tail_start[row]
            tail = rows.tails[first : first + rows.tail_length[row]]
            table = rows.tables[rows.table[row]][: rows.prefix[row]]
            paths.append([*map(int, table), *map(int, tail)])
        one = _Pass(
            paths,
            [int(token) for token in rows.tokens],
            [bool(length) for length in rows.tail_length],
            [int(row) for row in spec.logits],
            to_host(output.logits).copy(),
        )
        (done,) = scans
        one.steps = len(done.slots) - done.lead * len(done.start)
        one.branches = len({int(state) for state in done.saves if state < -1})
        one.num_states = cache.states.num_states
        found.append(one)
        return output

    patched: list[tuple[Any, str, Any, Any]] = [
        (PassStates, "scan", recording_scan, scan),
        (model, "run", recording_run, run),
    ]
    for owner, name, replacement, _ in patched:
        setattr(owner, name, replacement)
    try:
        yield found
    finally:
        for owner, name, _, original in patched:
            setattr(owner, name, original)


def _trees(name: str, checkpoint: Checkpoint) -> Iterator[Check]:
    """Every pass over a tree: its logits, steps and states."""
    oracle, error, branching = TreeOracle(checkpoint), 0.0, 0
    wrong_steps, most_branches, most_states, most_rows = 0, 0, 0, 1
    with _open(checkpoint) as llm:
        # A pass costs the same whatever its rows, so that trees have their full size.
        llm.cost_model = FixedCosts(lambda rows, context: 1.0)
        with _recorded(llm) as passes:
            for temperature in (0.8, 2.0):
                options: dict[str, Any] = {"temperature": temperature, "seed": 4}
                llm.generate(PROMPT, decoder="stree", max_tokens=64, ignore_eos=True, **options)
    by_slot: dict[int, int] = {}
    before: _Pass | None = None
    for one in passes:
        by_slot |= dict(zip((path[-1] for path in one.paths), one.tokens, strict=True))
        if any(one.is_node):
            branching += 1
            slots = one.paths[one.is_node.index(False)][:-1] if False in one.is_node else []
            nodes = [*slots, *(path[-1] for path in one.paths if path[-1] not in slots)]
            parents = [-1] * len(nodes)
            for path in one.paths:
                for parent, slot in zip([None, *path[:-1]], path, strict=True):
                    parents[nodes.index(slot)] = -1 if parent is None else nodes.index(parent)
            expected = oracle.logits([by_slot[slot] for slot in nodes], parents)
            for index, row in enumerate(one.rows):
                node = nodes.index(one.paths[row][-1])
                difference = np.abs(one.logits[index] - expected[node]).max()
                error = max(error, float(difference / np.abs(expected[node]).max()))
            wrong_steps += one.steps != _expected_steps(one, before)
            most_branches = max(most_branches, one.branches)
            most_rows = max(most_rows, len(one.paths))
        most_states = max(most_states, one.num_states)
        before = one
    yield Check(f"trees are verified, {name}", branching > 3, f"{branching} of {len(passes)}")
    yield Check(
        f"logits equal those of accumulated transitions, {name}", error < 5e-3, f"{error:.1e}"
    )
    yield Check(
        f"a step per node, and one per position that is replayed, {name}",
        wrong_steps == 0,
        f"{wrong_steps} of {branching} passes differ",
    )
    yield Check(
        f"no node's state is kept, {name}",
        most_states <= 4 and 0 < most_branches <= np.log2(most_rows),
        f"{most_states} states, {most_branches} of branches, {most_rows} rows",
    )


def _expected_steps(one: _Pass, before: _Pass | None) -> int:
    """The number of positions of all paths behind the last state that is known: that after a row of
    the pass before which was no node."""
    known = 0
    if before is not None:
        trunk = [
            path for path, is_node in zip(before.paths, before.is_node, strict=True) if not is_node
        ]
        written = {path[-1] for path in one.paths}
        for path in (trunk[0], trunk[-1]):
            is_shared = all(other[: len(path)] == path for other in one.paths)
            if is_shared and path[-1] not in written:
                known = max(known, len(path))
    return len({slot for path in one.paths for slot in path[known:]})


def _sizes() -> Iterator[Check]:
    """Trees are as large as a replay of the rounds says, from the tensors' own numbers."""
    checkpoint = mamba2_checkpoint()
    tensors = checkpoint.tensors
    products = sum(
        int(np.prod(np.shape(np.asarray(tensor))))
        for name, tensor in tensors.items()
        if name.endswith(("in_proj.weight", "out_proj.weight"))
    )
    numbers = 2 * 4 * 16 * 32  # layers, heads, values, state
    replay = 3 * numbers / (3 * numbers + 2 * products)
    for cost in (0.02, 0.1, 0.4):

        def seconds(rows: int, context: int, cost: float = cost) -> float:
            return 1 + cost * rows + 0.001 * context

        with _open(checkpoint) as llm:
            llm.cost_model = FixedCosts(seconds)
            decoder = catalogue.build("stree")
            asked: list[int] = []
            trace = _asked(llm, decoder, asked)
        expected = _replayed(trace, seconds, replay)
        yield Check(f"sizes equal the replay, {cost} per row", asked == expected, f"{asked[::8]}")


def _asked(llm: LLM, decoder: Any, asked: list[int]) -> list[TracedRound]:
    """The rounds of a text; appends the size that the drafter is asked for in each."""
    drafter, open_session = decoder.drafter, decoder.drafter.open

    def recording(sequence: Any) -> Any:
        session = open_session(sequence)
        propose = session.propose

        def asking(size: int) -> Any:
            asked.append(size)
            return propose(size)

        session.propose = asking
        return session

    drafter.open = recording
    return rounds(llm, decoder, PROMPT, 100, temperature=1.5)


def _replayed(
    trace: list[TracedRound], seconds: Callable[[int, int], float], replay: float
) -> list[int]:
    rates, sizes = [1 / (node + 2) for node in range(SIZE)], list[int]()
    for one in trace:
        context = len(one.text)
        row = (seconds(1 + SIZE, context) - seconds(1, context)) / SIZE
        best, best_goodput = 0, 0.0
        for size in range(SIZE + 1):
            hits = sum(rates[:size])
            goodput = (1 + hits) / (seconds(1 + size, context) + replay * row * hits)
            if goodput > best_goodput * (1 + 1e-12):
                best, best_goodput = size, goodput
        sizes.append(best)
        for node in range(SIZE):
            if node < len(one.tokens):
                rates[node] = 0.9 * rates[node] + 0.1 * (node in one.accepted)
            elif node >= best:
                rates[node] = 0.98 * rates[node] + 0.02 / (node + 2)
    return sizes

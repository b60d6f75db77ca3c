"""Programs of the native kernels: the order of their steps, their buffers and their barriers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from anydecode.kernels.library import Op
from anydecode.kernels.placement import arrange, assign_result, place, to_ops
from anydecode.kernels.steps import STREAM, Code, Step, Value

ROWS = 3
#: Ops that threads divide by columns, by heads or by experts, not by rows.
DIVIDED = {Code.LINEAR, Code.ATTEND, Code.EXPERTS}


def random_steps(draw: random.Random, count: int) -> tuple[list[Step], Value]:
    """Steps that read earlier values, as layers with attention and side branches do."""
    stream = Value(8, STREAM)
    values, steps = [stream], list[Step]()
    for _ in range(count):
        code = draw.choice([Code.LINEAR, Code.LINEAR, Code.ROPE, Code.ADD, Code.QUANTISE,
                            Code.STORE, Code.ATTEND, Code.EXPERTS, Code.LORA])  # fmt: skip
        inputs = tuple(draw.choices(values[-5:], k=1 + (code == Code.ADD)))
        if code == Code.STORE:
            steps.append(Step(code, inputs, None, cache="write"))
            continue
        if code == Code.LORA:
            y = draw.choice(values[-3:])
            if y is not stream:
                steps.append(Step(code, (inputs[0], y), y))
            continue
        keeps_width = code in (Code.ROPE, Code.ADD)
        out = Value(inputs[0].width if keeps_width else draw.choice([4, 8, 12, 40]))
        scratch = Value(20) if code == Code.EXPERTS else None
        cache = "read" if code == Code.ATTEND else ""
        steps.append(Step(code, inputs, out, scratch=scratch, cache=cache))
        if code == Code.ATTEND:
            steps.append(Step(Code.MERGE, (out,), out))
        values.append(out)
    result = Value(8)
    steps.append(Step(Code.ADD, (stream, values[-1]), result))
    return steps, result


def results(steps: Sequence[Step], result: Value) -> object:
    """What the steps compute, one after the other, with each value in a place of its own."""
    stream: dict[object, object] = {STREAM: "stream"}
    found, cache = dict[object, object](), tuple[object, ...]()
    for step in steps:
        inputs = [stream[v.offset] if v.offset in stream else found[v] for v in step.inputs]
        outcome = (step.code, *inputs, cache if step.cache == "read" else None)
        if step.cache == "write":
            cache = (*cache, hash(outcome))
        if step.output is not None:
            found[step.output] = hash(outcome)
    return found[result], cache


def results_in_memory(steps: Sequence[Step]) -> object:
    """The same with the values in their buffers, where a later value may overwrite an earlier."""
    memory, cache = {(STREAM, 8): "stream"}, tuple[object, ...]()
    for step in steps:
        inputs = [memory[v.offset, v.width] for v in step.inputs]  # type: ignore[index]
        outcome = (step.code, *inputs, cache if step.cache == "read" else None)
        if step.cache == "write":
            cache = (*cache, hash(outcome))
        computed = inputs[0] if step.code == Code.COPY else hash(outcome)
        for value, content in ((step.scratch, "scratch"), (step.output, computed)):
            if value is None:
                continue
            assert value.offset is not None
            begin, end = value.offset, value.offset + value.width
            if begin >= 0:
                memory = {
                    (start, width): kept
                    for (start, width), kept in memory.items()
                    if start < 0 or start + width <= begin or start >= end
                }
            memory[begin, value.width] = content  # type: ignore[assignment]
    return memory[STREAM, 8], cache


def numbers(value: Value, row: int | None) -> set[int]:
    """The places in memory of one row of a value, or of all its rows."""
    assert value.offset is not None
    first = -1000 if value.offset == STREAM else value.offset * ROWS
    rows = range(ROWS) if row is None else [row]
    return {first + r * value.width + i for r in rows for i in range(value.width)}


def has_race(steps: Sequence[Step], barriers: Sequence[int]) -> bool:
    """Whether a thread may read or overwrite what another writes at the same time: between two
    barriers the rows of the steps that work row by row run side by side, and each other step."""
    accessed: dict[int, set[tuple[object, bool]]] = {}
    for index, (step, barrier) in enumerate(zip(steps, barriers, strict=True)):
        if barrier or step.code == Code.EXPERTS:
            accessed = {}
        for row in [None] if step.code in DIVIDED else range(ROWS):
            unit = index if row is None else ("row", row)
            uses = [(cell, False) for v in step.inputs for cell in numbers(v, row)]
            for value in (step.output, step.scratch):
                if value is not None:
                    uses += [(cell, True) for cell in numbers(value, row)]
            if step.cache:  # each row is stored in a slot of its own; attention reads all
                slots = range(ROWS) if row is None else [row]
                uses += [(-9000 - slot, step.cache == "write") for slot in slots]
            if step.code in (Code.ATTEND, Code.MERGE):  # the states of attention
                uses.append((-9999, step.code == Code.ATTEND))
            for cell, is_write in uses:
                for other, wrote in accessed.get(cell, ()):
                    if other != unit and (is_write or wrote):
                        return True
                accessed.setdefault(cell, set()).add((unit, is_write))
        if step.code == Code.EXPERTS:
            accessed = {}
    return False


def arranged(
    steps: Sequence[Step], result: Value, reserved: int = 0
) -> tuple[list[Step], list[Op]]:
    """The steps in order and with buffers, and their ops."""
    ordered = arrange(steps)
    assign_result(ordered, result, STREAM)
    place(ordered, reserved)
    return ordered, to_ops(ordered)


def test_order_buffers_and_barriers_keep_the_results() -> None:
    """Against the steps in their first order, each value in a place of its own. The twin with one
    barrier fewer is detected."""
    draw, num_twins = random.Random(5), 0
    for _ in range(100):
        steps, result = random_steps(draw, draw.randrange(4, 20))
        expected = results(steps, result)
        ordered, ops = arranged(steps, result)
        assert results_in_memory(ordered) == expected
        barriers = [op.barrier for op in ops]
        assert not has_race(ordered, barriers)
        for left_out in [i for i, barrier in enumerate(barriers) if barrier]:
            num_twins += has_race(ordered, [b and i != left_out for i, b in enumerate(barriers)])
    assert num_twins > 100  # experts are a stage of their own without a barrier


def test_values_in_one_buffer_are_detected() -> None:
    x, y, z = Value(8, STREAM), Value(8, 0), Value(8, 4)
    out = Value(8, STREAM)
    steps = [Step(Code.LINEAR, (x,), y), Step(Code.LINEAR, (x,), z), Step(Code.ADD, (y, z), out)]
    with pytest.raises(KeyError):
        results_in_memory(steps)


def llama_layer() -> tuple[list[Step], Value]:
    """The steps of a layer in the order in which networks record them."""
    x, table = Value(64, STREAM), Value(8)
    table.offset = 0

    def norm(inputs: Value) -> tuple[list[Step], Value]:
        y, quantised = Value(64), Value(24)
        return [Step(Code.NORM, (inputs,), y), Step(Code.QUANTISE, (y,), quantised)], quantised

    steps, quantised = norm(x)
    q, k, v, turned, keys, attended = (Value(64) for _ in range(6))
    steps += [Step(Code.LINEAR, (quantised,), q), Step(Code.ROPE, (q, table), turned)]
    steps += [Step(Code.LINEAR, (quantised,), k), Step(Code.LINEAR, (quantised,), v)]
    steps += [Step(Code.ROPE, (k, table), keys), Step(Code.STORE, (keys, v), None, cache="write")]
    steps += [Step(Code.ATTEND, (turned,), attended, cache="read")]
    steps += [Step(Code.MERGE, (attended,), attended)]
    inputs, mixed, y = Value(24), Value(64), Value(64)
    steps += [Step(Code.QUANTISE, (attended,), inputs), Step(Code.LINEAR, (inputs,), mixed)]
    steps += [Step(Code.ADD, (x, mixed), y)]
    more, quantised = norm(y)
    gate, up, gated, narrow, down, out = (Value(w) for w in (160, 160, 160, 60, 64, 64))
    steps += [*more, Step(Code.LINEAR, (quantised,), gate), Step(Code.LINEAR, (quantised,), up)]
    steps += [Step(Code.GATED, (gate, up), gated), Step(Code.QUANTISE, (gated,), narrow)]
    steps += [Step(Code.LINEAR, (narrow,), down), Step(Code.ADD, (y, down), out)]
    return steps, out


def test_a_layer_has_ten_stages() -> None:
    """Queries, keys and values are one stage, and so are their rotation and what stores them. The
    twin in the order of its record waits more often."""
    steps, out = llama_layer()
    _, ops = arranged(steps, out, 16)
    assert sum(op.barrier for op in ops) == 10
    steps, out = llama_layer()
    assign_result(steps, out, STREAM)
    place(steps, 16)
    assert sum(op.barrier for op in to_ops(steps)) > 10

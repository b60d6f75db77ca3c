"""Traces: what is read, and the prompts that stand for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anydecode.cluster.simulator.trace_files import (
    HASHED_TOKENS,
    TracedRequest,
    arrivals,
    read_trace,
)
from anydecode.errors import InvalidRequestError


def test_a_trace_of_azure(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,3180,0\n"
    )
    first, second = read_trace(file)
    assert second.time - first.time == pytest.approx(0.5)
    assert (first.num_prompt, first.num_tokens) == (4808, 10)
    assert second.num_tokens == 1


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [(3000, [7, 8]), (1000, [7, 9]), (2000, [1])]
    file.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 600, "output_length": 5, "hash_ids": h})
            + "\n"
            for t, h in rows
        )
    )
    found = read_trace(file)
    assert [(one.time, one.blocks) for one in found] == [(1.0, (7, 9)), (2.0, (1,)), (3.0, (7, 8))]
    assert len(read_trace(file, 2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "x,y\n1,2\n3,4\n", "is no trace"),
        ("a.csv", "", "has 0 requests"),
        ("a.jsonl", "[1]\n", "is no trace"),
        ("a.jsonl", "{}\n", "is no trace"),
        ("a.jsonl", "text\n", "is no trace"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_trace(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_trace(tmp_path / "missing.csv")


def test_arrivals_have_the_rate_and_the_ratios_of_the_trace() -> None:
    trace = [TracedRequest(time, 10, 4) for time in (100.0, 101.0, 104.0)]
    assert [one.time for one in arrivals(trace, rate=0.5)] == [0.0, 1.0, 4.0]
    assert [one.time for one in arrivals(trace, rate=1.0)] == [0.0, 0.5, 2.0]


@pytest.mark.parametrize("shorten", [1, 16, 100])
def test_prompts_begin_alike_as_far_as_their_hashes(shorten: float) -> None:
    blocks = [(1, 2, 3), (1, 2, 70_000), (4, 2, 3)]
    trace = [TracedRequest(n, 3 * HASHED_TOKENS, 5, one) for n, one in enumerate(blocks)]
    first, second, third = (one.prompt for one in arrivals(trace, 1.0, shorten))
    assert all(0 <= token < 256 for one in (first, second, third) for token in one)
    length = HASHED_TOKENS / shorten
    assert len(first) == round(3 * length)
    common = next(i for i, pair in enumerate(zip(first, second, strict=True)) if len(set(pair)) > 1)
    assert 2 * length - 1 <= common < 2 * length + 4
    assert first[0] != third[0]


def test_prompts_without_hashes_share_nothing() -> None:
    trace = [TracedRequest(n, 40, 5) for n in range(300)]
    assert len({tuple(one.prompt[:4]) for one in arrivals(trace, 1.0)}) == 300

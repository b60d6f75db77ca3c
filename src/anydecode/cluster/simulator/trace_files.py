"""Traces of requests: the public ones of Azure (CSV) and of Mooncake (JSON lines)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from anydecode.cluster.simulator.simulation import Arrival
from anydecode.errors import InvalidRequestError

#: Tokens of a prompt that share a hash in Mooncake's traces.
HASHED_TOKENS = 512
_BASE = 256
_DIGITS = 4


@dataclass(frozen=True)
class TracedRequest:
    """A request of a trace.

    Attributes:
        time: When it arrived, in seconds.
        num_prompt: Number of tokens of its prompt.
        num_tokens: Number of tokens of its answer.
        blocks: Hashes of the `HASHED_TOKENS` tokens each of its prompt; empty if they are unknown.
    """

    time: float
    num_prompt: int
    num_tokens: int
    blocks: tuple[int, ...] = ()


def mean_context(trace: Sequence[TracedRequest]) -> float:
    """The mean number of positions that a generated token attends to."""
    total = sum(one.num_tokens * (one.num_prompt + one.num_tokens / 2) for one in trace)
    return total / max(1, sum(one.num_tokens for one in trace))


def read_trace(file: Path, max_requests: int | None = None) -> list[TracedRequest]:
    """The first requests of a trace, in order of arrival.

    Args:
        file: A file of the Azure LLM inference traces (columns TIMESTAMP, ContextTokens and
            GeneratedTokens), or one of Mooncake (`.jsonl`; times in milliseconds).
        max_requests: Maximum number of requests; None: all.

    Raises:
        InvalidRequestError: The file cannot be read, or is none of these.
    """
    read = _mooncake if file.suffix == ".jsonl" else _azure
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            found = list(islice(read(lines), max_requests))
    except OSError as error:
        raise InvalidRequestError(f"the trace {file} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise InvalidRequestError(
            f"{file} is no trace: it needs the columns TIMESTAMP, ContextTokens and"
            " GeneratedTokens, or JSON lines with timestamp, input_length and output_length"
        ) from None
    if len(found) < 2:
        raise InvalidRequestError(f"the trace {file} has {len(found)} requests; 2 are needed")
    return sorted(found, key=lambda one: one.time)


def _azure(lines: Any) -> Iterator[TracedRequest]:
    for row in csv.DictReader(lines):
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        prompt, tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield TracedRequest(time, max(1, prompt), max(1, tokens))


def _mooncake(lines: Any) -> Iterator[TracedRequest]:
    for line in lines:
        one = json.loads(line)
        yield TracedRequest(
            one["timestamp"] / 1000,
            max(1, int(one["input_length"])),
            max(1, int(one["output_length"])),
            tuple(int(block) for block in one.get("hash_ids", ())),
        )


def scaled(
    requests: Sequence[TracedRequest], rate: float, shorten: float = 1.0
) -> list[TracedRequest]:
    """The requests of a trace at another rate and with other lengths, from time 0 on.

    Args:
        requests: In order of arrival.
        rate: Mean number of requests per second; the gaps keep their ratios.
        shorten: A divisor of the lengths of prompts and answers.
    """
    first, last = requests[0].time, requests[-1].time
    span = (len(requests) - 1) / rate
    factor = span / (last - first) if last > first else 0.0
    return [
        TracedRequest(
            factor * (one.time - first),
            max(1, round(one.num_prompt / shorten)),
            max(1, round(one.num_tokens / shorten)),
            one.blocks,
        )
        for one in requests
    ]


def repeated(requests: Sequence[TracedRequest], num: int) -> list[TracedRequest]:
    """`num` requests: those of a trace, again and again. Prompts of different repetitions have no
    block in common."""
    first, last = requests[0].time, requests[-1].time
    period = (last - first) * len(requests) / (len(requests) - 1)
    num_blocks = 1 + max(max(one.blocks, default=0) for one in requests)
    found = []
    for number in range(num):
        copy, index = divmod(number, len(requests))
        one = requests[index]
        blocks = tuple(block + copy * num_blocks for block in one.blocks)
        time = one.time + copy * period
        found.append(TracedRequest(time, one.num_prompt, one.num_tokens, blocks))
    return found


def arrivals(requests: Sequence[TracedRequest], rate: float, shorten: float = 1.0) -> list[Arrival]:
    """The requests of a trace for a simulation. Prompts begin alike as far as their hashes do.

    Args:
        requests: In order of arrival.
        rate: Mean number of requests per second; the gaps keep their ratios.
        shorten: A divisor of the lengths of prompts, hashed blocks and answers.
    """
    block_length = max(_DIGITS + 1, HASHED_TOKENS / shorten)
    return [
        Arrival(one.time, _prompt(number, one, block_length), one.num_tokens)
        for number, one in enumerate(scaled(requests, rate, shorten))
    ]


def _prompt(number: int, one: TracedRequest, block_length: float) -> list[int]:
    """Tokens below `_BASE`: each block begins with the digits of its hash, a prompt without hashes
    with those of its number."""
    tokens = [0] * one.num_prompt
    if not one.blocks:
        tokens[:_DIGITS] = _digits(number)[: one.num_prompt]
    for index, block in enumerate(one.blocks):
        start = round(index * block_length)
        for offset, digit in enumerate(_digits(block)):
            if start + offset < len(tokens):
                tokens[start + offset] = digit
    return tokens


def _digits(number: int) -> list[int]:
    return [number // _BASE**place % _BASE for place in range(_DIGITS)]

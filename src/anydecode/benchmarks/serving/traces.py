"""Traces of real services: arrival times and lengths of prompts and answers.

Supported are the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake's (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from anydecode.errors import InvalidRequestError

#: Tokens per hash id of a Mooncake trace.
BLOCK = 512


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: Arrival time, in seconds after the first request.
        prompt: Prompt length, in tokens.
        output: Answer length, in tokens.
        blocks: Ids of the prompt's blocks; equal ids mean equal text.
        block: Tokens per block.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    block: int = BLOCK


def read_trace(path: Path) -> list[Arrival]:
    """All requests of a trace, by time. Raises `InvalidRequestError` if the file is not a trace."""
    try:
        reader = _mooncake if path.suffix == ".jsonl" else _azure
        arrivals = sorted(reader(path), key=lambda one: one.at)
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"{path.name} is not a trace in the Azure or Mooncake format: {error}"
        ) from None
    if not arrivals:
        raise InvalidRequestError(f"{path.name} contains no requests")
    first = arrivals[0].at
    return [replace(one, at=one.at - first) for one in arrivals]


def _azure(path: Path) -> Iterator[Arrival]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as file:
        for line in filter(str.strip, file):
            row = json.loads(line)
            yield Arrival(
                row["timestamp"] / 1000,
                row["input_length"],
                row["output_length"],
                tuple(row.get("hash_ids", ())),
            )


def scaled(
    trace: list[Arrival], *, requests: int, rate: float, longest: int, output: int, shrink: float
) -> list[Arrival]:
    """Scale a trace to a machine.

    Args:
        trace: The requests of the trace.
        requests: Number of requests to take from its start.
        rate: Mean requests per second.
        longest: Longest prompt, in tokens.
        output: Longest answer, in tokens.
        shrink: Factor on all lengths, including blocks, so that the prefix cache hit rate stays.
    """
    chosen = trace[:requests]
    span = chosen[-1].at - chosen[0].at
    scale = (len(chosen) - 1) / rate / span if span > 0 else 0.0
    return [
        replace(
            one,
            at=(one.at - chosen[0].at) * scale if scale else index / rate,
            prompt=max(1, min(longest, round(one.prompt * shrink))),
            output=max(1, min(output, round(one.output * shrink))),
            block=max(1, round(BLOCK * shrink)),
        )
        for index, one in enumerate(chosen)
    ]


_WORDS = (
    "the a river over under light of stone and house with many small words that come to mind when "
    "someone writes about weather numbers people cities work music"
).split()


def prompt_text(arrival: Arrival, number: int, salt: str = "") -> str:
    """A prompt of words, about one token each. Equal blocks give equal words, so that prefixes are
    shared as in the trace. A different `salt` gives different words, so that no cache holds
    them."""
    words: list[str] = []
    block = 0
    while len(words) < arrival.prompt:
        has_block_id = block < len(arrival.blocks)
        seed = f"block {arrival.blocks[block]}" if has_block_id else f"request {number} {block}"
        source = random.Random(salt + seed)
        words += source.choices(_WORDS, k=min(arrival.block, arrival.prompt - len(words)))
        block += 1
    return " ".join(words)

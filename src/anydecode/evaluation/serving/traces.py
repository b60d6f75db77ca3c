"""Traces of real services: when requests came, how long prompts and answers were.

Read are the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and
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

#: Tokens that one hash id of a Mooncake trace stands for.
BLOCK = 512


@dataclass(frozen=True)
class Arrival:
    """One request: seconds after the first, prompt and answer in tokens, and the prompt's blocks
    (equal ids: equal text) of `block` tokens each."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    block: int = BLOCK


def read_trace(path: Path) -> list[Arrival]:
    """All requests of a trace, by time. Raises `InvalidRequestError` for a file that is none."""
    try:
        read = _mooncake if path.suffix == ".jsonl" else _azure
        found = sorted(read(path), key=lambda one: one.at)
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"{path.name} is no trace that can be read: {error}") from None
    if not found:
        raise InvalidRequestError(f"{path.name} holds no requests")
    first = found[0].at
    return [replace(one, at=one.at - first) for one in found]


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


def fitted(
    trace: list[Arrival], *, requests: int, rate: float, longest: int, output: int, shrink: float
) -> list[Arrival]:
    """The first `requests` of a trace, at `rate` requests a second on average, lengths times
    `shrink`, prompts of at most `longest` tokens and answers of at most `output`. Blocks shrink
    with the prompts, so that the same share of them is found in a prefix cache."""
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
    """Words, about one token each; equal blocks give equal words, so that prefixes are shared as
    they were. Another `salt` gives other words throughout: nothing of them is in any cache."""
    words: list[str] = []
    block = 0
    while len(words) < arrival.prompt:
        known = block < len(arrival.blocks)
        seed = f"block {arrival.blocks[block]}" if known else f"request {number} {block}"
        source = random.Random(salt + seed)
        words += source.choices(_WORDS, k=min(arrival.block, arrival.prompt - len(words)))
        block += 1
    return " ".join(words)

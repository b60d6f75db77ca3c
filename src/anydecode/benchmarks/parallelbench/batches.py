"""`anydecode bench diffusion-batches`: tokens per second of several requests at a time, of
diffusion decoders and of the same weights decoded causally.

The causal model has the matrices of the diffusion model, and each row sees those before it only:
its text means nothing, but a token costs what a causal model of that size costs. Every answer has
the same number of tokens. Rounds are interleaved.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.parallelbench.bench import questions
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import progress
from anydecode.report import JsonFile, split_methods, split_names, table_console, write_report
from anydecode.tasks.tasks import TASKS

#: The largest number of requests at a time.
MAX_REQUESTS = 256
#: The decoder of the causal rows.
CAUSAL = "autoregressive"


def causal_llm(llm: LLM, threads: int | None) -> LLM:
    """The same weights, decoded causally."""
    model: Any = copy.copy(llm.model)
    model.spec = replace(model.spec, causal=True, block_size=None, logit_shift=0)
    return LLM(model, tokenizer=llm.tokenizer, threads=threads)


def run(llm: LLM, decoder: str, prompts: Sequence[str], tokens: int) -> dict[str, float]:
    """Seconds of all prompts at once, and the sums of tokens, passes and rows over the answers, of
    which each has `tokens` tokens."""
    llm.clear()
    start = time.perf_counter()
    answers = llm.generate(
        [*prompts], decoder=decoder, max_tokens=tokens, ignore_eos=True, temperature=0.0
    )
    return {
        "seconds": time.perf_counter() - start,
        "tokens": sum(len(answer.tokens) for answer in answers),
        "passes": sum(answer.stats.passes for answer in answers),
        "rows": sum(answer.stats.rows for answer in answers),
    }


def measure(
    name: str,
    methods: Sequence[str],
    counts: Sequence[int],
    tokens: int,
    rounds: int,
    threads: int | None,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A line per number of requests and decoder, the causal one first: medians over rounds."""
    every = [one.prompt for group in questions([*TASKS], None, max(counts), 0) for one in group]
    prompts = every[:: len(every) // max(counts)]
    with LLM(name, threads=threads) as llm, causal_llm(llm, threads) as causal:
        runs = [(causal, CAUSAL), *((llm, method) for method in methods)]
        for model, method in runs:
            run(model, method, prompts[:1], tokens)  # reads the weights
        cells = [(model, method, count) for count in counts for model, method in runs]
        found: list[list[dict[str, float]]] = [[] for _ in cells]
        for _ in range(rounds):
            for results, (model, method, count) in zip(found, cells, strict=True):
                results.append(run(model, method, prompts[:count], tokens))
                advance()
    lines: list[dict[str, Any]] = []
    causal_speed = 1.0
    for results, (_, method, count) in zip(found, cells, strict=True):
        last, seconds = results[-1], [one["seconds"] for one in results]
        speed = last["tokens"] / median(seconds)
        causal_speed = speed if method == CAUSAL else causal_speed
        lines.append(
            {
                "model": name,
                "decoder": method,
                "requests": count,
                "tokens_per_second": speed,
                "ratio": speed / causal_speed,
                "tokens_per_pass": last["tokens"] / last["passes"],
                "rows_per_token": last["rows"] / last["tokens"],
                "seconds": seconds,
            }
        )
    return lines


def bench_batches(
    models: Annotated[
        str, typer.Option("--models", help="Names or folders, separated by commas.")
    ] = "tiny-blocks,smollm2-135m-blocks",
    methods: Annotated[
        str, typer.Option("--methods", help="Decoders, separated by semicolons.")
    ] = "sdar;sdar:remasking=static;fast-dllm:cache=block",
    requests: Annotated[
        str, typer.Option("--requests", help="Requests at a time, separated by commas.")
    ] = "1,8,32",
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds; medians count.")] = 3,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Print the tokens per second of several requests at a time, of diffusion decoders and of the
    same weights decoded causally.

    Example: anydecode bench diffusion-batches --models tiny-blocks --rounds 1 --json batches.json
    """
    parts = split_names(requests)
    counts = [int(part) if part.isdecimal() else 0 for part in parts]
    if not counts or not all(1 <= count <= MAX_REQUESTS for count in counts):
        raise InvalidRequestError(
            f"--requests {requests!r} must be numbers from 1 to {MAX_REQUESTS}, separated by commas"
        )
    decoders, names = split_methods(methods), split_names(models)
    before = os.getloadavg()[0]
    with progress("runs", len(names) * rounds * len(counts) * (1 + len(decoders))) as bar:
        lines = [
            line
            for name in names
            for line in measure(
                name, decoders, counts, tokens, rounds, threads or None, bar.advance
            )
        ]
    report = {
        "machine": {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "threads": threads,
            "load": [before, os.getloadavg()[0]],
        },
        "max_tokens": tokens,
        "rounds": rounds,
        "lines": lines,
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print a line per model, number of requests and decoder."""
    from rich.table import Table

    console, machine = table_console(), report["machine"]
    load = " to ".join(f"{one:.1f}" for one in machine["load"])
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads'] or 'all'} threads, load"
        f" {load}: answers of {report['max_tokens']} tokens, {report['rounds']} rounds"
    )
    table = Table(box=None)
    for name in ("model", "decoder"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "tokens/s", "of causal", "tokens/pass", "rows/token"):
        table.add_column(name, justify="right")
    for line in report["lines"]:
        table.add_row(
            line["model"],
            line["decoder"],
            str(line["requests"]),
            f"{line['tokens_per_second']:.0f}",
            f"{line['ratio']:.2f}",
            f"{line['tokens_per_pass']:.2f}",
            f"{line['rows_per_token']:.2f}",
        )
    console.print(table)

"""`anydecode bench kernels`: the time of a pass over n new tokens with the compiled kernels,
compared with the time to read the weights once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.benchmarks.passes import first_logits, prefill, sequence_rows
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import Library, load_library
from anydecode.kernels.pages import map_anonymous
from anydecode.machine import cpu_name
from anydecode.report import JsonFile, write_report

COUNTS = (1, 2, 4, 8, 16, 32, 512)
#: Passes over more rows than this are long: they are timed in every eighth round, with one row of
#: logits, like a prefill.
_MAX_SHORT = 64


def seconds(run: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def read_bandwidth(library: Library, threads: int, repeats: int = 15) -> float:
    """Read bandwidth of memory with all threads, in bytes per second, the best of several runs."""
    words = np.frombuffer(map_anonymous(1 << 27, huge=True), dtype=np.int64)
    words.fill(1)
    best = min(
        seconds(lambda: library.read(words.ctypes.data, words.size, threads))
        for _ in range(repeats)
    )
    return words.nbytes / best


def measure(model: Any, context: int, format: str | None, rounds: int) -> dict[str, Any]:
    """Time all row counts in interleaved rounds, so that background load affects them alike.

    Args:
        model: A model on the native executor.
        context: Positions before the new tokens.
        format: Format of the key-value cache; None: the executor's.
        rounds: Number of rounds.
    """
    executor, library = model.executor, load_library()
    assert library is not None
    cache = model.new_cache(max(8192, context + max(COUNTS)), format)  # as many as an engine has
    if context:
        prefill(model, cache, context)
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for round_index in range(rounds):
        for count in COUNTS:
            if count > _MAX_SHORT and round_index % 8:
                continue
            rows = sequence_rows([5] * count, context, model.spec.num_layers)
            output_spec = first_logits(count if count <= _MAX_SHORT else 1)
            times[count].append(seconds(partial(model.run, rows, cache, output_spec)))
    bandwidth = read_bandwidth(library, executor.threads)
    weights = executor.packer.num_bytes
    passes = [
        {"n": n, "best": min(t), "median": statistics.median(t), "ratio": min(t) / min(times[1])}
        for n, t in times.items()
    ]
    return {
        "machine": cpu_name(), "variant": library.variant, "threads": executor.threads,
        "context": context, "cache": cache.format, "weight_bytes": weights,
        "read_bytes_per_second": bandwidth, "read_bound": weights / bandwidth, "passes": passes,
    }  # fmt: skip


def print_results(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    bound = result["read_bound"]
    print(
        f"{result['machine']}, {result['variant']}, {result['threads']} threads, context"
        f" {result['context']}, {result['cache']} cache; {result['weight_bytes'] / 1e6:.1f} MB of"
        f" weights, read at {result['read_bytes_per_second'] / 1e9:.1f} GB/s in"
        f" {bound * 1e3:.2f} ms"
    )
    print("    n  best ms  median ms   of n=1    GB/s  share of the read bound")
    for row in result["passes"]:
        rate = result["weight_bytes"] / row["best"] / 1e9
        print(
            f"{row['n']:5d} {row['best'] * 1e3:8.2f} {row['median'] * 1e3:10.2f}"
            f" {row['ratio']:7.2f}x {rate:7.1f} {bound / row['best']:8.0%}"
        )
    print(f"packed and recorded in {result['seconds_to_pack']:.2f} s")


def bench_kernels(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Positions before the new tokens.")
    ] = 256,
    cache: Annotated[
        str | None,
        typer.Option("--cache", help="Format of the key-value cache; default: the engine's."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 24,
    json_file: JsonFile = None,
) -> None:
    """Time passes over 1 to 512 new tokens, beside the time to read the weights once.

    Example: anydecode bench kernels --threads 2 --json -
    """
    from anydecode.models.families import build_model
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.opening import choose_executor

    checkpoint = load_checkpoint(model)
    started = time.perf_counter()
    built = build_model(checkpoint, executor=choose_executor("native", threads or None))
    seconds_to_pack = time.perf_counter() - started
    if cache is not None and cache not in built.cache_formats:
        raise InvalidRequestError(
            f"--cache {cache!r} is not a format of the native kernels; choose from"
            f" {', '.join(built.cache_formats)}"
        )
    result = measure(built, context, cache, rounds) | {"seconds_to_pack": seconds_to_pack}
    write_report(result, json_file, lambda: print_results(result))

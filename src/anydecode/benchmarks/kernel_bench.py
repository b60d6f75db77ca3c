"""`anydecode bench kernels`: the time of a pass over n new tokens with the compiled kernels,
compared with the time to read once the weights that it needs.

A pass needs all weights but the experts that no row has chosen, and tables of which it reads rows.
With `--fast-math` the same passes run with the same kernels compiled for speed alone: the compiler
may change the order of sums and fuse products, and logarithms, exponentials, sines and cosines are
those of the C library. The difference in time is the cost of equal bits on every machine.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.benchmarks.passes import first_logits, prefill, sequence_rows, varied_tokens
from anydecode.errors import InvalidRequestError
from anydecode.kernels.build import (
    FAST_MATH_FLAGS,
    compile_library,
    find_compiler,
    library_name,
)
from anydecode.kernels.library import Library, load_library
from anydecode.kernels.native import NativeExecutor
from anydecode.kernels.pages import map_anonymous
from anydecode.machine import cpu_name
from anydecode.progress import note
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


@functools.cache
def fast_math_library() -> Library:
    """The variant of the kernels that is in use, compiled for speed alone.

    Raises:
        InvalidRequestError: There is no C compiler.
    """
    compiler, library = find_compiler(), load_library()
    if compiler is None:
        raise InvalidRequestError("--fast-math compiles the kernels, and no C compiler was found")
    assert library is not None
    note("building the kernels for speed alone")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = compile_library(
            Path(folder) / library_name(),
            compiler,
            flags=FAST_MATH_FLAGS,
            variants=[library.variant],
        )
        return Library(path, library.variant)


def measure(
    model: Any,
    context: int,
    format: str | None,
    rounds: int,
    other: NativeExecutor | None = None,
) -> dict[str, Any]:
    """Time all row counts in interleaved rounds, so that background load affects them alike.

    Args:
        model: A model on the native executor.
        context: Positions before the new tokens.
        format: Format of the key-value cache; None: the executor's.
        rounds: Number of rounds.
        other: An executor of the same network, which is timed beside the model's.
    """
    executor, library = model.executor, load_library()
    assert library is not None
    cache = model.new_cache(max(8192, context + max(COUNTS)), format)  # as many as an engine has
    if context:
        prefill(model, cache, context)
    both = [executor] if other is None else [executor, other]
    times: dict[int, list[list[float]]] = {count: [] for count in COUNTS}
    reads = {}
    for round_index in range(rounds):
        for count in COUNTS:
            if count > _MAX_SHORT and round_index % 8:
                continue
            rows = sequence_rows(varied_tokens(count), context, model.spec.num_layers)
            output_spec = first_logits(count if count <= _MAX_SHORT else 1)
            times[count].append([])
            for one in both:
                run = partial(one.run, rows, cache, output_spec)
                if other is not None:
                    run()  # at its start the threads of the other build may still be spinning
                one.take_expert_reads()
                times[count][-1].append(seconds(run))
            reads[count] = executor.take_expert_reads()
    bandwidth = read_bandwidth(library, executor.threads)
    weights, whole = executor.packer.num_bytes, _bytes_of_matrices(model)
    first = min(one for one, *_ in times[1])
    passes = []
    for count, runs in times.items():
        own = [one for one, *_ in runs]
        chosen = reads[count]
        size = whole + chosen.num_bytes - chosen.num_stored
        entry = {
            "n": count, "best": min(own), "median": statistics.median(own),
            "ratio": min(own) / first, "read_bytes": size, "read_bound": size / bandwidth,
            "experts": chosen.experts, "expert_bytes": chosen.num_bytes,
            "all_expert_bytes": chosen.num_stored,
        }  # fmt: skip
        if other is not None:
            entry["fast_math_best"] = min(fast for _, fast in runs)
            entry["equal_bits_cost"] = min(own) / entry["fast_math_best"] - 1
        passes.append(entry)
    return {
        "machine": cpu_name(), "variant": library.variant, "threads": executor.threads,
        "context": context, "cache": cache.format, "weight_bytes": weights,
        "read_bytes_per_second": bandwidth, "passes": passes,
    }  # fmt: skip


def _bytes_of_matrices(model: Any) -> int:
    """Bytes of all packed matrices, but for tables of which a pass reads rows alone."""
    weights, packer = model.network.weights, model.executor.packer
    tables = weights.tables
    if weights.head is not weights.embedding:
        tables = [*tables, weights.embedding]
    size: int = packer.num_bytes - sum(packer.packed_bytes(table) for table in tables)
    return size


def print_results(result: dict[str, Any]) -> None:
    """Print the report as tables."""
    passes = result["passes"]
    print(
        f"{result['machine']}, {result['variant']}, {result['threads']} threads, context"
        f" {result['context']}, {result['cache']} cache; {result['weight_bytes'] / 1e6:.1f} MB of"
        f" weights, memory is read at {result['read_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    print("    n  best ms  median ms   of n=1  MB to read    GB/s  share of the read bound")
    for row in passes:
        print(
            f"{row['n']:5d} {row['best'] * 1e3:8.2f} {row['median'] * 1e3:10.2f}"
            f" {row['ratio']:7.2f}x {row['read_bytes'] / 1e6:11.1f}"
            f" {row['read_bytes'] / row['best'] / 1e9:7.1f} {row['read_bound'] / row['best']:8.0%}"
        )
    print(f"packed and recorded in {result['seconds_to_pack']:.2f} s")
    if passes[0]["all_expert_bytes"]:
        print("\nexperts that a row has chosen, which a pass reads once, in all layers")
        print("    n  experts  MB of them  of all experts")
        for row in passes:
            share = row["expert_bytes"] / row["all_expert_bytes"]
            print(
                f"{row['n']:5d} {row['experts']:8d} {row['expert_bytes'] / 1e6:11.1f} {share:10.1%}"
            )
    if "fast_math_best" in passes[0]:
        print("\nthe same kernels compiled with -ffast-math and the C library's functions")
        print("    n  best ms  cost of equal bits")
        for row in passes:
            print(
                f"{row['n']:5d} {row['fast_math_best'] * 1e3:8.2f} {row['equal_bits_cost']:+10.1%}"
            )


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
    fast_math: Annotated[
        bool,
        typer.Option(
            "--fast-math",
            help="Time also the same kernels compiled for speed alone: the cost of equal bits.",
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Time passes over 1 to 512 new tokens, beside the time to read the weights once. Of a mixture
    of experts, show how many experts they read.

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
    executor: Any = built.executor
    other = executor.compiled_as(fast_math_library()) if fast_math else None
    result = measure(built, context, cache, rounds, other) | {"seconds_to_pack": seconds_to_pack}
    write_report(result, json_file, lambda: print_results(result))

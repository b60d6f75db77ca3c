"""Times passes over n new tokens, and compares them with the time to read the weights once.

python benchmarks/kernels.py [model.gguf] [--threads N] [--context 256] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.kernels.native import NativeExecutor, physical_cores
from anydecode.kernels.pages import map_anonymous
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint

COUNTS = (1, 2, 4, 8, 16, 32, 512)
_CACHES = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}


def rows_of(count: int, context: int, layers: int, table: np.ndarray) -> Rows:
    """Rows of `count` new tokens of one sequence after a context of `context` tokens."""
    positions = np.arange(context, context + count, dtype=np.int32)
    zeros = np.zeros(count, np.int32)
    tokens, stops = np.full(count, 5, np.int32), np.full(count, layers, np.int32)
    return Rows(
        tokens, positions, table[positions], [table], zeros, positions + 1, np.zeros(0, np.int32),
        zeros, zeros, zeros, stops,
    )  # fmt: skip


def seconds(run: Any) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def read_bandwidth(executor: NativeExecutor, repeats: int = 15) -> float:
    """Read bandwidth of memory with all threads, in bytes per second, the best of several runs."""
    words = torch.frombuffer(map_anonymous(1 << 27, huge=True), dtype=torch.int64)
    words.fill_(1)
    library = executor._library
    best = min(
        seconds(lambda: library.read(words.data_ptr(), words.numel(), executor.threads))
        for _ in range(repeats)
    )
    return words.numel() * 8 / best


def measure(executor: NativeExecutor, spec: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Time all row counts in interleaved rounds, so that background load affects them alike."""
    slots = max(8192, args.context + max(COUNTS))  # as many as an engine has
    table = np.arange(slots, dtype=np.int32)  # in the order of a new pool
    cache = args.model.new_cache(slots, _CACHES[args.cache] if args.cache else executor.cache_dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for round_index in range(args.rounds):
        for count in COUNTS:
            if count > 64 and round_index % 8:
                continue
            rows = rows_of(count, args.context, spec.num_layers, table)
            logit_rows = np.arange(count if count <= 64 else 1, dtype=np.int32)
            output_spec = OutputSpec(logit_rows)
            times[count].append(seconds(lambda r=rows, o=output_spec: executor.run(r, cache, o)))
    bandwidth = read_bandwidth(executor)
    weights = executor.packer.num_bytes
    passes = [
        {"n": n, "best": min(t), "median": statistics.median(t), "ratio": min(t) / min(times[1])}
        for n, t in times.items()
    ]
    return {
        "variant": executor._library.variant, "threads": executor.threads,
        "context": args.context, "cache": cache.format, "weight_bytes": weights,
        "read_bytes_per_second": bandwidth, "read_bound": weights / bandwidth, "passes": passes,
    }  # fmt: skip


def print_results(result: dict[str, Any]) -> None:
    bound = result["read_bound"]
    print(
        f"{result['variant']}, {result['threads']} threads, context {result['context']},"
        f" {result['cache']} cache; {result['weight_bytes'] / 1e6:.1f} MB of weights,"
        f" read at {result['read_bytes_per_second'] / 1e9:.1f} GB/s in {bound * 1e3:.2f} ms"
    )
    print("    n  best ms  median ms   of n=1    GB/s  share of the read bound")
    for row in result["passes"]:
        rate = result["weight_bytes"] / row["best"] / 1e9
        print(
            f"{row['n']:5d} {row['best'] * 1e3:8.2f} {row['median'] * 1e3:10.2f}"
            f" {row['ratio']:7.2f}x {rate:7.1f} {bound / row['best']:8.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument(
        "--cache", choices=sorted(_CACHES), help="format of the cache; default: that of the engine"
    )
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.model = build_model(load_checkpoint(args.model))
    network, spec = args.model.network, args.model.spec
    started = time.perf_counter()
    executor = NativeExecutor(
        network.weights.embedding, spec.vocab_size, spec.num_layers, network.layer, network.head,
        embedding_scale=spec.embedding_scale, threads=args.threads,
    )  # fmt: skip
    pack_seconds = time.perf_counter() - started
    result = measure(executor, spec, args) | {"seconds_to_pack": pack_seconds}
    if args.json:
        print(json.dumps(result))
        return
    print_results(result)
    print(f"packed and recorded in {pack_seconds:.2f} s")


if __name__ == "__main__":
    main()

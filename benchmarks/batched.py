"""Throughput of many sequences decoded together: anydecode and llama.cpp's `llama-batched-bench`.

python benchmarks/batched.py MODEL.gguf --bench PATH [--fastest Q4_0.gguf] [--sequences 1,16]
    [--prompt 128] [--tokens 64] [--rounds 3] [--threads N] [--json]

PATH is the tool, built from the llama.cpp source in the sdist of llama-cpp-python:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build build --target llama-batched-bench      # build/bin/llama-batched-bench

Rounds are interleaved. Both engines decode random prompts of equal length. The time is measured
from when every sequence has its first token until all have their last, without prefill. llama.cpp
runs with flash attention on and off, and the better time counts. `--fastest` is the same checkpoint
in llama.cpp's fastest 4-bit format (python -m anydecode.benchmarks.baseline_worker quantize MODEL
--to FILE)."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from anydecode import LLM
from anydecode.benchmarks.baselines import find_file
from anydecode.machine import cpu_name


def own_rate(llm: LLM, count: int, args: argparse.Namespace, seed: int) -> float:
    """Tokens per second of anydecode, over all sequences."""
    generator = np.random.default_rng(seed)
    size = min(llm.tokenizer.vocab_size, llm.model.spec.vocab_size)
    prompts = generator.integers(0, size, (count, args.prompt)).tolist()
    requests = [
        llm.request(prompt, max_tokens=args.tokens, ignore_eos=True, decoder="autoregressive")
        for prompt in prompts
    ]
    for request in requests:
        llm.start(request, background=False)
    sequences = [job.sequence for request in requests for job in request.jobs]
    llm.driver.advance(lambda: all(s.length > args.prompt for s in sequences))
    before, start = llm.engine.num_tokens, time.perf_counter()
    llm.driver.advance(lambda: all(request.process for request in requests))
    return (llm.engine.num_tokens - before) / (time.perf_counter() - start)


def llama_rates(file: str, counts: list[int], args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of llama-batched-bench, by number of sequences."""
    best = dict.fromkeys(counts, 0.0)
    context = max(counts) * (args.prompt + args.tokens)
    command = [
        args.bench, "-m", file, "-c", str(context), "-b", "2048", "-ub", "512",
        "-npp", str(args.prompt), "-ntg", str(args.tokens), "-npl", ",".join(map(str, counts)),
        "-t", str(args.threads), "-tb", str(args.threads), "--output-format", "jsonl",
    ]  # fmt: skip
    for flash in ("on", "off"):
        process = subprocess.run([*command, "-fa", flash], capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"llama-batched-bench failed: {process.stderr.strip()[-300:]}")
        for line in process.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                best[row["pl"]] = max(best[row["pl"]], row["speed_tg"])
    return best


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the report."""
    path = find_file(args.model)
    counts = [int(count) for count in args.sequences.split(",")]
    files = {"llama.cpp, the same file": path}
    if args.fastest:
        files["llama.cpp, its fastest format"] = args.fastest
    longest = max(counts) * (args.prompt + args.tokens)
    llm = LLM(
        path, threads=args.threads, backend=args.backend, prefix_cache=False,
        cache_positions=longest + 64,
    )  # fmt: skip
    speeds: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in counts} for name in ("anydecode", *files)
    }
    for number in range(args.rounds):
        for count in counts:
            speeds["anydecode"][count].append(own_rate(llm, count, args, number))
        for name, file in files.items():
            for count, speed in llama_rates(file, counts, args).items():
                speeds[name][count].append(speed)
    return {
        "machine": cpu_name(),
        "threads": args.threads,
        "model": Path(path).name,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "tokens_per_second": speeds,
    }


def show(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(
        f"{result['model']}, {result['threads']} threads of {result['machine']}:"
        f" {result['tokens']} tokens after {result['prompt']}, tokens per second"
        " (median of the rounds)"
    )
    speeds = result["tokens_per_second"]
    medians = {
        name: {count: float(np.median(s)) for count, s in by_count.items()}
        for name, by_count in speeds.items()
    }
    print(f"{'sequences':32}" + "".join(f"{count:>18}" for count in medians["anydecode"]))
    for name, by_count in medians.items():
        cells = ""
        for count, speed in by_count.items():
            ratio = "" if name == "anydecode" else f" ({medians['anydecode'][count] / speed:.2f}x)"
            cells += f"{f'{speed:.1f}{ratio}':>18}"
        print(f"{name:32}{cells}")


def main() -> None:
    """Run the benchmark with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--bench", required=True, help="llama-batched-bench")
    parser.add_argument("--fastest", help="the same checkpoint in llama.cpp's fastest format")
    parser.add_argument("--sequences", default="1,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", help="native or torch; default: the best available")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = compare(args)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()

"""`anydecode bench batched`: throughput of many sequences decoded together, of anydecode and of
llama.cpp's `llama-batched-bench`.

The tool is built from the llama.cpp source in the sdist of llama-cpp-python:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build build --target llama-batched-bench      # build/bin/llama-batched-bench

Rounds are interleaved. Both engines decode random prompts of equal length. The time is measured
from when every sequence has its first token until all have their last, without prefill. llama.cpp
runs with flash attention on and off, and the better time counts.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.baselines import find_file
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.report import JsonFile, write_report


@dataclass(frozen=True)
class Setting:
    """Settings of both engines: tokens of a prompt and of an answer, and CPU threads."""

    prompt: int
    tokens: int
    threads: int


def own_rate(llm: LLM, count: int, setting: Setting, seed: int) -> float:
    """Tokens per second of anydecode, over all sequences."""
    generator = np.random.default_rng(seed)
    size = min(llm.tokenizer.vocab_size, llm.model.spec.vocab_size)
    prompts = generator.integers(0, size, (count, setting.prompt)).tolist()
    requests = [
        llm.request(prompt, max_tokens=setting.tokens, ignore_eos=True, decoder="autoregressive")
        for prompt in prompts
    ]
    for request in requests:
        llm.start(request, background=False)
    sequences = [job.sequence for request in requests for job in request.jobs]
    llm.driver.advance(lambda: all(s.length > setting.prompt for s in sequences))
    before, start = llm.engine.num_tokens, time.perf_counter()
    llm.driver.advance(lambda: all(request.done for request in requests))
    return (llm.engine.num_tokens - before) / (time.perf_counter() - start)


def llama_rates(bench: Path, file: str, counts: list[int], setting: Setting) -> dict[int, float]:
    """Tokens per second of llama-batched-bench, by number of sequences."""
    best = dict.fromkeys(counts, 0.0)
    context = max(counts) * (setting.prompt + setting.tokens)
    command = [
        str(bench), "-m", file, "-c", str(context), "-b", "2048", "-ub", "512",
        "-npp", str(setting.prompt), "-ntg", str(setting.tokens),
        "-npl", ",".join(map(str, counts)), "-t", str(setting.threads),
        "-tb", str(setting.threads), "--output-format", "jsonl",
    ]  # fmt: skip
    for flash in ("on", "off"):
        process = subprocess.run([*command, "-fa", flash], capture_output=True, text=True)
        if process.returncode:
            raise InvalidRequestError(
                f"llama-batched-bench failed: {' '.join(process.stderr.split())[-300:]}"
            )
        for line in process.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                best[row["pl"]] = max(best[row["pl"]], row["speed_tg"])
    return best


def compare(
    path: str,
    bench: Path,
    fastest: str | None,
    counts: list[int],
    rounds: int,
    backend: str | None,
    setting: Setting,
) -> dict[str, Any]:
    """Run all rounds and return the report."""
    files = {"llama.cpp, the same file": path}
    if fastest:
        files["llama.cpp, its fastest format"] = fastest
    positions = max(counts) * (setting.prompt + setting.tokens) + 64
    speeds: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in counts} for name in ("anydecode", *files)
    }
    with LLM(
        path, threads=setting.threads, backend=backend, prefix_cache=False,
        cache_positions=positions,
    ) as llm:  # fmt: skip
        for number in range(rounds):
            for count in counts:
                speeds["anydecode"][count].append(own_rate(llm, count, setting, number))
            for name, file in files.items():
                for count, speed in llama_rates(bench, file, counts, setting).items():
                    speeds[name][count].append(speed)
    return {
        "machine": cpu_name(),
        "threads": setting.threads,
        "model": Path(path).name,
        "prompt": setting.prompt,
        "tokens": setting.tokens,
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


def bench_batched(
    bench: Annotated[Path, typer.Option("--bench", help="The program llama-batched-bench.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A name or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    fastest: Annotated[
        str | None,
        typer.Option(
            "--fastest",
            help="The same checkpoint in llama.cpp's fastest 4-bit format, as a file that `python"
            " -m anydecode.benchmarks.baseline_worker quantize MODEL --to FILE` writes.",
        ),
    ] = None,
    sequences: Annotated[
        str, typer.Option("--sequences", help="Numbers of sequences, separated by commas.")
    ] = "1,16",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 3,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads per engine; 0: all cores.")
    ] = 0,
    backend: Annotated[
        str | None, typer.Option("--backend", help="native or torch; default: the best available.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the throughput of sequences decoded together with llama.cpp's.

    Example: anydecode bench batched --bench build/bin/llama-batched-bench --sequences 1,16
    """
    if not bench.is_file():
        raise InvalidRequestError(f"--bench {bench} is not a file: name the built program")
    try:
        counts = [int(count) for count in sequences.split(",")]
    except ValueError:
        counts = []
    if min(counts, default=0) < 1:
        raise InvalidRequestError(
            f"--sequences {sequences!r} is not a list of numbers from 1, such as 1,16"
        )
    setting = Setting(prompt, tokens, threads or usable_cores())
    result = compare(find_file(model), bench, fastest, counts, rounds, backend, setting)
    write_report(result, json_file, lambda: show(result))

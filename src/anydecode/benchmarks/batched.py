"""`anydecode bench batched`: prefill and decoding of one or many sequences, of anydecode and of
llama.cpp's `llama-batched-bench`, or that of ik_llama.cpp.

The tool of llama.cpp is built from the source in the sdist of llama-cpp-python:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build build --target llama-batched-bench      # build/bin/llama-batched-bench

Rounds are interleaved. All engines read random prompts of equal length. Prefill lasts until every
sequence has its first token, decoding from then until all have their last. The others run with
flash attention on and, unless keys and values are quantised, off; the better figure counts.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.baselines import find_file
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import progress
from anydecode.report import JsonFile, write_report

# The formats of keys and values, as the others name them.
CACHES = {"float16": "f16", "int8": "q8_0", "float32": "f32"}
# |    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s | ...
_ROW = re.compile(r"\|" + r"\s*([\d.]+) \|" * 8)


@dataclass(frozen=True)
class Setting:
    """Settings of all engines: tokens of prompts and answers, numbers of sequences, format of keys
    and values, and CPU threads."""

    prompts: list[int]
    counts: list[int]
    tokens: int
    cache: str
    threads: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Pairs of a prompt's tokens and a number of sequences."""
        return [(prompt, count) for prompt in self.prompts for count in self.counts]

    @property
    def positions(self) -> int:
        """Positions of the cache that the largest pair needs."""
        return max(self.counts) * (max(self.prompts) + self.tokens)


@dataclass(frozen=True)
class Speed:
    """Tokens per second over all sequences."""

    prefill: float
    decoding: float


def own_speed(llm: LLM, prompt: int, count: int, tokens: int, seed: int) -> Speed:
    """The speed of anydecode."""
    generator = np.random.default_rng(seed)
    size = min(llm.tokenizer.vocab_size, llm.model.spec.vocab_size)
    prompts = generator.integers(0, size, (count, prompt)).tolist()
    requests = [
        llm.request(prompt, max_tokens=tokens, ignore_eos=True, decoder="autoregressive")
        for prompt in prompts
    ]
    start = time.perf_counter()
    for request in requests:
        llm.start(request, background=False)
    sequences = [job.sequence for request in requests for job in request.jobs]
    llm.driver.advance(lambda: all(s.length > prompt for s in sequences))
    before, middle = llm.engine.num_tokens, time.perf_counter()
    llm.driver.advance(lambda: all(request.done for request in requests))
    num_decoded = llm.engine.num_tokens - before
    return Speed(count * prompt / (middle - start), num_decoded / (time.perf_counter() - middle))


def _read_output(text: str) -> dict[tuple[int, int], Speed]:
    """The speeds in the tool's output: lines of JSON, or rows of a table."""
    found = {}
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found[row["pp"], row["pl"]] = Speed(row["speed_pp"], row["speed_tg"])
        elif match := _ROW.match(line):
            cells = [float(cell) for cell in match.groups()]
            found[int(cells[0]), int(cells[2])] = Speed(cells[5], cells[7])
    return found


def llama_speeds(bench: Path, file: str, setting: Setting) -> dict[tuple[int, int], Speed]:
    """The best speeds of llama-batched-bench, by tokens of a prompt and number of sequences."""
    best = dict.fromkeys(setting.cells, Speed(0.0, 0.0))
    cache = CACHES[setting.cache]
    command = [
        str(bench.absolute()), "-m", str(Path(file).absolute()),
        "-c", str(setting.positions), "-b", "2048", "-ub", "512",
        "-npp", ",".join(map(str, setting.prompts)), "-ntg", str(setting.tokens),
        "-npl", ",".join(map(str, setting.counts)), "-t", str(setting.threads),
        "-tb", str(setting.threads), "-ctk", cache, "-ctv", cache, "--output-format", "jsonl",
    ]  # fmt: skip
    for flash in ("on",) if setting.cache == "int8" else ("on", "off"):
        with TemporaryDirectory() as folder:  # ik_llama.cpp writes llama.log where it runs
            process = subprocess.run(
                [*command, "-fa", flash], cwd=folder, capture_output=True, text=True
            )
        found = _read_output(process.stdout) or _read_output(process.stderr)
        if process.returncode or found.keys() != best.keys():
            reason = " ".join(process.stderr.split())[-300:]
            raise InvalidRequestError(f"{bench} failed on {file}: {reason}")
        for cell, speed in found.items():
            best[cell] = Speed(
                max(best[cell].prefill, speed.prefill), max(best[cell].decoding, speed.decoding)
            )
    return best


def compare(
    path: str,
    benches: dict[str, Path],
    files: list[str],
    rounds: int,
    backend: str | None,
    setting: Setting,
) -> dict[str, Any]:
    """Run all rounds and return the report."""
    speeds: dict[str, list[dict[tuple[int, int], Speed]]] = {}
    others = {
        f"{name}, {label}": (bench, file)
        for name, bench in benches.items()
        for file, label in _labels([path, *files]).items()
    }
    own_name = f"anydecode, {Path(path).name}"
    with (
        LLM(
            path, threads=setting.threads, backend=backend, prefix_cache=False, cache=setting.cache,
            cache_positions=setting.positions + 64,
        ) as llm,
        progress("measurements", rounds * (1 + len(others))) as bar,
    ):  # fmt: skip
        for number in range(rounds):
            bar.begin(own_name)
            own = {
                (prompt, count): own_speed(llm, prompt, count, setting.tokens, number)
                for prompt, count in setting.cells
            }
            speeds.setdefault(own_name, []).append(own)
            bar.advance()
            for name, (bench, file) in others.items():
                bar.begin(name)
                speeds.setdefault(name, []).append(llama_speeds(bench, file, setting))
                bar.advance()
    return {
        "machine": cpu_name(),
        "threads": setting.threads,
        "tokens": setting.tokens,
        "cache": setting.cache,
        "speeds": [
            {
                "engine": name,
                "prompt": prompt,
                "sequences": count,
                "prefill": [each[prompt, count].prefill for each in found],
                "decoding": [each[prompt, count].decoding for each in found],
            }
            for name, found in speeds.items()
            for prompt, count in setting.cells
        ],
    }


def _labels(files: list[str]) -> dict[str, str]:
    """The name by which each file is shown: without its folder, unless two would look the same."""
    names = {file: Path(file).name for file in files}
    counts = Counter(names.values())
    return {file: name if counts[name] == 1 else file for file, name in names.items()}


def show(result: dict[str, Any]) -> None:
    """Print the report as two tables."""
    print(
        f"{result['threads']} threads of {result['machine']}, {result['cache']} cache,"
        f" {result['tokens']} tokens per answer; tokens per second (median of the rounds)"
    )
    rows = result["speeds"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    cells = list(dict.fromkeys((row["prompt"], row["sequences"]) for row in rows))
    width = max(map(len, engines))
    for phase in ("prefill", "decoding"):
        medians = {
            (row["engine"], (row["prompt"], row["sequences"])): float(np.median(row[phase]))
            for row in rows
        }
        print(f"{phase:{width}}" + "".join(f"{f'{n} x {prompt}':>17}" for prompt, n in cells))
        for engine in engines:
            line = ""
            for cell in cells:
                own, speed = medians[engines[0], cell], medians[engine, cell]
                ratio = "" if engine == engines[0] else f" ({own / speed:.2f}x)"
                line += f"{f'{speed:.1f}{ratio}':>17}"
            print(f"{engine:{width}}{line}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if min(numbers, default=0) < 1:
        raise InvalidRequestError(
            f"{option} {text!r} is not a list of numbers from 1, such as 1,16"
        )
    return numbers


def _programs(options: list[str]) -> dict[str, Path]:
    programs = {}
    for option in options:
        name, _, path = option.rpartition("=")
        programs[name or "llama.cpp"] = Path(path)
        if not Path(path).is_file():
            raise InvalidRequestError(f"--bench {path} is not a file: name the built program")
    return programs


def bench_batched(
    bench: Annotated[
        list[str],
        typer.Option(
            "--bench",
            metavar="[NAME=]PATH",
            help="A program llama-batched-bench, and the name of its engine; repeatable.",
        ),
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="A name or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            help="The same checkpoint in a format that the other engines read faster; they run it"
            " too. Repeatable. `anydecode quantize` or `python -m"
            " anydecode.benchmarks.baseline_worker quantize MODEL --to FILE` writes one.",
        ),
    ] = None,
    sequences: Annotated[
        str, typer.Option("--sequences", help="Numbers of sequences, separated by commas.")
    ] = "1,16",
    prompt: Annotated[
        str, typer.Option("--prompt", help="Tokens of a prompt, separated by commas.")
    ] = "128",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of an answer.")] = 64,
    cache: Annotated[
        str, typer.Option("--cache", help=f"Format of keys and values: {', '.join(CACHES)}.")
    ] = "float16",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 3,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads per engine; 0: all cores.")
    ] = 0,
    backend: Annotated[
        str | None, typer.Option("--backend", help="native or torch; default: the best available.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare prefill and decoding with llama.cpp's, for one or many sequences.

    Example: anydecode bench batched --bench build/bin/llama-batched-bench --prompt 512,2048
    """
    if cache not in CACHES:
        raise InvalidRequestError(f"--cache {cache!r} is unknown here: {', '.join(CACHES)}")
    setting = Setting(
        _numbers("--prompt", prompt), _numbers("--sequences", sequences), tokens, cache,
        threads or usable_cores(),
    )  # fmt: skip
    programs = _programs(bench)
    result = compare(find_file(model), programs, file or [], rounds, backend, setting)
    write_report(result, json_file, lambda: show(result))

"""`anydecode bench compare`: speed, peak memory and start-up, also of the server, of the work tree
against a commit.

The commit is checked out as a git worktree in a temporary folder. Every round starts one process
per version, and measures the versions in turn, in alternating order. Other load on the machine, and
what differs from process to process, thus affects both alike. The versions are compared by the
ratio within a round; the interval is that of the geometric mean of the ratios.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from anydecode.benchmarks.baselines import (
    ANSWER_TIMEOUT,
    ANYDECODE,
    LOAD_TIMEOUT,
    PREFILL_ROWS,
    Worker,
)
from anydecode.benchmarks.serving.baselines import started_server
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.report import JsonFile, write_report
from anydecode.tasks.prompts import spread

#: Prompts that are answered alone, and together.
NUM_ALONE, NUM_TOGETHER = 3, 8
#: Names of the two versions in the report.
OURS = "work tree"


class Measure(NamedTuple):
    """One row of the table."""

    name: str
    unit: str


PLAIN = Measure("plain decoding", "tokens/s")
PREFILL = Measure(f"prefill of {PREFILL_ROWS}", "tokens/s")
AUTO = Measure("auto, alone", "tokens/s")
TOGETHER = Measure(f"auto, {NUM_TOGETHER} together", "tokens/s")
MEMORY = Measure("peak memory", "MiB")
START = Measure("start-up to the first token", "s")
READY = Measure("server ready", "s")
MEASURES = (PLAIN, PREFILL, AUTO, TOGETHER, MEMORY, START, READY)


def git(*arguments: str, folder: Path | None = None) -> str:
    """The output of a git command. Raises `InvalidRequestError` with git's message."""
    try:
        process = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise InvalidRequestError("git is not installed: bench compare needs it") from None
    if process.returncode:
        raise InvalidRequestError(" ".join(process.stderr.split()) or "git failed")
    return process.stdout.strip()


@contextmanager
def checkout(ref: str, root: Path) -> Iterator[Path]:
    """The tree of `ref` in a temporary folder, as a git worktree that is removed at the end."""
    try:
        commit = git("rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}", folder=root)
    except InvalidRequestError:
        raise InvalidRequestError(
            f"--ref {ref!r} is no commit of {root}: give a hash, a branch, a tag or HEAD~1"
        ) from None
    with tempfile.TemporaryDirectory(prefix="anydecode-compare-") as parent:
        folder = Path(parent) / "tree"
        git("worktree", "add", "--detach", str(folder), commit, folder=root)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder), folder=root)


def compare(
    trees: dict[str, Path], model: str, threads: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Measure the two `trees` (name to folder; the first is compared with the second). Returns the
    report for the table and `--json`."""
    for name, tree in trees.items():  # compiles kernels and measures costs, once per machine
        measure_round({name: tree}, model, threads, tokens)
    values: dict[Measure, dict[str, list[float]]] = {
        measure: {name: [] for name in trees} for measure in MEASURES
    }
    for number in range(rounds):
        ordered = dict(list(trees.items())[:: -1 if number % 2 else 1])
        for name, results in measure_round(ordered, model, threads, tokens).items():
            for measure, value in results.items():
                values[measure][name].append(value)
    return {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "versions": list(trees),
        "tokens": tokens,
        "rounds": rounds,
        "measures": [
            {**measure._asdict(), "values": by_name, **ratio_interval(*by_name.values())}
            for measure, by_name in values.items()
        ],
    }


def ratio_interval(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The geometric mean of the paired ratios of `ours` to `theirs`, and its 95% interval by
    Student's t on their logarithms."""
    logs = np.log(np.array(ours) / np.array(theirs))
    margin = t_quantile(len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    low, high = np.exp([logs.mean() - margin, logs.mean() + margin])
    return {"ratio": float(np.exp(logs.mean())), "interval": [float(low), float(high)]}


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t by the expansion of Cornish and Fisher, within 1% from
    three degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def measure_round(
    trees: dict[str, Path], model: str, threads: int, tokens: int
) -> dict[str, dict[Measure, float]]:
    """Start one process per tree, and measure them in turn."""
    results: dict[str, dict[Measure, float]] = {name: {} for name in trees}
    workers: dict[str, Worker] = {}
    try:
        for name, tree in trees.items():
            start = time.perf_counter()
            path = {"PYTHONPATH": str(tree / "src")}
            workers[name] = Worker(
                ANYDECODE, model, threads, sys.executable, timeout=LOAD_TIMEOUT, environment=path
            )
            workers[name].timeout = ANSWER_TIMEOUT
            _ask(name, workers[name], prompt="The", tokens=1, decoder="autoregressive")
            results[name][START] = time.perf_counter() - start
        for measure, run in _RUNS.items():
            for name, worker in workers.items():
                results[name][measure] = run(name, worker, tokens)
        for name, worker in workers.items():
            answer = _ask(name, worker, prompt="The", tokens=1, decoder="autoregressive")
            results[name][MEMORY] = answer["peak_memory"] / 2**20
    finally:
        for worker in workers.values():
            worker.close()
    for name, tree in trees.items():
        results[name][READY] = seconds_to_serve(name, tree, model, threads)
    return results


def seconds_to_serve(name: str, tree: Path | None, model: str, threads: int) -> float:
    """Seconds from the start of the server of `tree` (None: of this package) until it accepts
    requests."""
    environment = {} if tree is None else {"PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "anydecode", "serve", model, "--threads", str(threads)]
    start = time.perf_counter()
    with started_server(
        name,
        shlex.join([*command, "--port", "{port}"]),
        LOAD_TIMEOUT,
        environment,
    ):
        return time.perf_counter() - start


def _ask(name: str, worker: Worker, **request: Any) -> dict[str, Any]:
    answer = {} if worker.missing else worker.ask(**request)
    problem = worker.missing or answer.get("missing")
    if problem is not None:
        raise InvalidRequestError(f"{name} cannot be measured: {problem}")
    return answer


def _alone(decoder: str, first_prompt: int) -> Callable[[str, Worker, int], float]:
    """Measures tokens per second of prompts answered one after the other."""
    prompts = spread(first_prompt + NUM_ALONE)[first_prompt:]

    def run(name: str, worker: Worker, tokens: int) -> float:
        answers = [
            _ask(name, worker, prompt=prompt.text, tokens=tokens, decoder=decoder)
            for prompt in prompts
        ]
        return float(sum(a["tokens"] for a in answers) / sum(a["total"] for a in answers))

    return run


def _together(name: str, worker: Worker, tokens: int) -> float:
    prompts = [prompt.text for prompt in spread(2 * NUM_ALONE + NUM_TOGETHER)[2 * NUM_ALONE :]]
    answer = _ask(name, worker, prompts=prompts, tokens=tokens, decoder="auto")
    return float(answer["tokens"] / answer["total"])


def _prefill(name: str, worker: Worker, tokens: int) -> float:
    text = " one two three four" * (PREFILL_ROWS // 4)
    answer = _ask(name, worker, prompt=text, tokens=1, decoder="autoregressive")
    return float(answer["prompt_tokens"] / answer["first"])


#: Every measure has prompts of its own, so that none finds another's in the prefix cache.
_RUNS = {
    PLAIN: _alone("autoregressive", 0),
    PREFILL: _prefill,
    AUTO: _alone("auto", NUM_ALONE),
    TOGETHER: _together,
}


def print_report(report: dict[str, Any]) -> None:
    """Print the machine and the table."""
    machine, (ours, theirs) = report["machine"], report["versions"]
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads;"
        f" {report['model']}, {report['tokens']} tokens, {report['rounds']} rounds\n"
        f"medians, and the ratio {ours} / {theirs}: better above 1 for tokens/s, below 1 for MiB"
        " and s"
    )
    print(f"{'':28}{ours:>12}{theirs[:12]:>14} {'':9}{'ratio':>7}  95% interval")
    for row in report["measures"]:
        first, second = (np.median(values) for values in row["values"].values())
        low, high = row["interval"]
        print(
            f"{row['name']:28}{first:12.4g}{second:14.4g} {row['unit']:9}{row['ratio']:7.3f}"
            f"  {low:.3f} to {high:.3f}"
        )


def bench_compare(
    ref: Annotated[
        str, typer.Option("--ref", help="The commit to compare with: a hash, a branch or HEAD~1.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per answer.")] = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", min=4, help="Pairs of measurements, with new processes.")
    ] = 10,
    json_file: JsonFile = None,
) -> None:
    """Compare the work tree of the current folder with another commit of it.

    Example: anydecode bench compare --ref HEAD~1 --threads 2
    """
    root = Path(git("rev-parse", "--show-toplevel"))
    if not (root / "src" / "anydecode").is_dir():
        raise InvalidRequestError(f"{root} is not a source tree of anydecode: run this in one")
    with checkout(ref, root) as folder:
        trees = {OURS: root, ref: folder}
        report = compare(trees, model, threads or usable_cores(), tokens, rounds)
    write_report(report, json_file, lambda: print_report(report))

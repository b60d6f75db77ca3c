"""Other engines beside ours, in one run: same checkpoint, prompts, threads, all greedy.

Every engine lives in a process of its own, and the rounds are interleaved, so that whatever the
machine does meanwhile falls on all alike. What is compared is a ratio, within a round.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.errors import InvalidRequestError
from anydecode.evaluation import baseline_worker
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.evaluation.prompts import spread
from anydecode.evaluation.report import JsonFile, write_report

OURS = "anydecode"
ROWS = (1, 2, 4, 8, 16, 32)
PREFILL_ROWS = 512
#: Seconds that an engine may take to load, and for one answer.
LOADING, ANSWERING = 600.0, 180.0


@dataclass
class Result:
    """One engine's figures: medians over rounds and prompts. `rates` has one entry per round."""

    engine: str
    version: str
    settings: str
    load_seconds: float
    time_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory: int = 0
    ratio: float | None = None
    prompt_tokens: int = 0
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    rows: dict[str, float] = field(default_factory=dict)


class Worker:
    """A running `baseline_worker.py`, or another such `file`. `missing` says why it does not
    run. One
    that takes longer than `patience` seconds for an answer is ended."""

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        python: str,
        file: str = baseline_worker.__file__,
        patience: float | None = None,
    ) -> None:
        program = [python, file, engine, model, "--threads", str(threads)]
        quiet = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OPENVINO_TELEMETRY": "0",
        }
        self.engine = engine
        self.patience = patience
        self.process = subprocess.Popen(
            program,
            env=quiet,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello = self._answer()
        self.missing: str | None = self.hello.get("missing")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.process.kill()
            return {"missing": f"{self.engine} gave no answer within {self.patience:g} s"}
        line = self.process.stdout.readline()
        if not line:
            return {"missing": f"{self.engine} ended with exit code {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


def started(
    engines: Sequence[str],
    model: str,
    threads: int,
    python: str,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> list[Worker]:
    """Workers for engines other than ours, until `stack` closes; those that do not run say why."""
    workers = []
    for engine in engines:
        worker = Worker(engine, model, threads, python, patience=LOADING)
        worker.patience = ANSWERING
        stack.callback(worker.close)
        loaded = f"loaded in {worker.hello.get('load_seconds', 0.0):.1f} s"
        tell(f"{engine}: {worker.missing or loaded}")
        workers.append(worker)
    return workers


def compare(
    model: str,
    *,
    engines: list[str],
    threads: int,
    tokens: int,
    prompts: int,
    rounds: int,
    rows: bool = False,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Time `engines` on the GGUF file `model`; everything the table and `--json` show."""
    texts = [prompt.text for prompt in spread(prompts)]
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anydecode-peers-")))
        workers = []
        for engine in engines:
            file = _file_for(engine, model, folder, python, missing)
            if file is None:
                continue
            ours = engine == OURS
            worker = Worker(engine, file, threads, sys.executable if ours else python)
            stack.callback(worker.close)
            if worker.missing is None:
                workers.append(worker)
            else:
                missing[engine] = worker.missing
        results = measure(workers, texts, tokens, rounds, missing)
        for worker in workers if rows else ():
            if worker.engine in results:
                results[worker.engine].rows = _rows(worker)
    add_ratios(results)
    return {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "tokens": tokens,
        "prompts": len(texts),
        "rounds": rounds,
        "engines": [asdict(result) for result in results.values()],
        "missing": missing,
    }


def _file_for(
    engine: str, model: str, folder: Path, python: str, missing: dict[str, str]
) -> str | None:
    """The file an engine reads: the model's own, or what llama.cpp's quantiser makes of it."""
    if engine != "llama.cpp-q4_0":
        return model
    target = folder / f"{Path(model).stem}-q4_0.gguf"
    command = [python, baseline_worker.__file__, "quantize", model, "--to", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return str(target)
    missing[engine] = next(iter(done.stderr.splitlines()[-1:]), "quantising failed")
    return None


def measure(
    workers: list[Worker],
    texts: list[str],
    tokens: int,
    rounds: int,
    missing: dict[str, str],
) -> dict[str, Result]:
    """Interleaved rounds after a warm-up; an engine that fails on the way joins `missing`."""
    results: dict[str, Result] = {}
    samples: dict[str, list[list[dict[str, Any]]]] = {}
    for worker in workers:
        hello = worker.hello
        results[worker.engine] = Result(
            worker.engine, hello["version"], hello["settings"], hello["load_seconds"]
        )
        samples[worker.engine] = [[] for _ in range(rounds)]
        worker.ask(prompt=texts[0], tokens=min(tokens, 16))
    for turn, text, worker in _interleaved(workers, texts, rounds):
        if worker.engine not in results:
            continue
        answer = worker.ask(prompt=text, tokens=tokens)
        if "missing" in answer:
            missing[worker.engine] = answer["missing"]
            del results[worker.engine]
        else:
            samples[worker.engine][turn].append(answer)
    for engine, result in results.items():
        _fill(result, samples[engine])
    return results


def _interleaved(
    workers: list[Worker], texts: list[str], rounds: int
) -> Iterator[tuple[int, str, Worker]]:
    for turn in range(rounds):
        for number, text in enumerate(texts):
            offset = (turn + number) % max(len(workers), 1)
            for worker in workers[offset:] + workers[:offset]:
                yield turn, text, worker


def _fill(result: Result, rounds: list[list[dict[str, Any]]]) -> None:
    """Medians; a round's rate is its tokens after each first, over their time."""
    for answers in rounds:
        seconds = sum(answer["total"] - answer["first"] for answer in answers)
        result.rates.append(sum(answer["tokens"] - 1 for answer in answers) / seconds)
        result.firsts.append(statistics.mean(answer["first"] for answer in answers))
    result.tokens_per_second = statistics.median(result.rates)
    result.time_to_first_token = statistics.median(result.firsts)
    result.prompt_tokens = sum(answer["prompt_tokens"] for answer in rounds[0])
    result.peak_memory = max(answer["peak_memory"] for answers in rounds for answer in answers)


def _rows(worker: Worker) -> dict[str, float]:
    """Seconds of a pass over n rows at 256 positions of context, and of a prefill; empty where the
    engine shows no passes."""
    if worker.engine not in baseline_worker.SHOWING_PASSES:
        return {}
    costs = worker.ask(rows=list(ROWS), context=256).get("rows", {})
    prefill = worker.ask(rows=[PREFILL_ROWS], context=0).get("rows", {})
    return {**costs, **prefill}


def add_ratios(results: dict[str, Result]) -> None:
    """How many times an engine's rate ours is: the median over rounds of the ratio in a round."""
    ours = results.get(OURS)
    if ours is None:
        return
    for result in results.values():
        pairs = zip(ours.rates, result.rates, strict=True)
        result.ratio = statistics.median(mine / other for mine, other in pairs)


def print_report(report: dict[str, Any]) -> None:
    """The tables, the machine's name above them and missing engines below."""
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    console = Console()
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"{report['model']}, {report['tokens']} tokens, {report['prompts']} prompts, "
        f"{report['rounds']} rounds"
    )
    table = Table(box=None)
    for name in ("engine", "first token ms", "tokens/s", "ours is", "peak MiB", "settings"):
        table.add_column(name, justify="left" if name in ("engine", "settings") else "right")
    for row in report["engines"]:
        table.add_row(
            f"{row['engine']} {row['version']}",
            f"{row['time_to_first_token'] * 1e3:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x" if row["ratio"] else "",
            f"{row['peak_memory'] / 2**20:.0f}",
            row["settings"],
        )
    console.print(table)
    _print_rows(console, report)
    for engine, reason in report["missing"].items():
        console.print(f"{engine}: missing ({reason})", highlight=False)


def _print_rows(console: Any, report: dict[str, Any]) -> None:
    from rich.table import Table

    shown = [row for row in report["engines"] if row["rows"]]
    if not shown:
        return
    columns = [*map(str, ROWS), str(PREFILL_ROWS)]
    table = Table("ms of a pass over n rows", *columns[:-1], f"prefill {columns[-1]}", box=None)
    for row in shown:
        table.add_row(row["engine"], *(f"{row['rows'][column] * 1e3:.1f}" for column in columns))
    console.print(table)


def bench_baselines(
    model: Annotated[str, typer.Option("--model", "-m", help="A name or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    engines: Annotated[
        str, typer.Option("--engines", help="Names, separated by commas.")
    ] = ",".join(baseline_worker.PLAIN),
    threads: Annotated[int, typer.Option("--threads", help="CPU threads for each.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per prompt.")] = 128,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="How many prompts.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many rounds.")] = 3,
    rows: Annotated[bool, typer.Option("--rows", help="Passes over n rows as well.")] = False,
    python: Annotated[
        str, typer.Option("--python", help="The interpreter that has the peers.")
    ] = sys.executable,
    json_file: JsonFile = None,
) -> None:
    """Time this engine and its peers on one checkpoint, in one run.

    Example: anydecode bench peers --tokens 128 --json peers.json
    """
    chosen = [name.strip() for name in engines.split(",") if name.strip()]
    unknown = sorted(set(chosen) - set(baseline_worker.ENGINES))
    if unknown:
        known = ", ".join(baseline_worker.ENGINES)
        raise InvalidRequestError(f"no engine {', '.join(unknown)}: there are {known}")
    report = compare(
        find_file(model),
        engines=chosen,
        threads=threads or usable_cores(),
        tokens=tokens,
        prompts=prompts,
        rounds=rounds,
        rows=rows,
        python=python,
    )
    write_report(report, json_file, lambda: print_report(report))


def find_file(model: str) -> str:
    """The `.gguf` file of a model: a path as it is, a name by the loader."""
    if Path(model).is_file():
        return model
    from anydecode.models.loading import resolve

    path = str(resolve(model))
    if not path.endswith(".gguf"):
        raise InvalidRequestError(f"peers are compared on a .gguf file, and {model} is none")
    return path

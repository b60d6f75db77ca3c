"""`anydecode bench baselines`: compares this engine with baselines on the same checkpoint, prompts
and threads, all greedy.

Each engine runs in its own process. Rounds are interleaved, so that other load on the machine
affects all engines equally. Engines are compared by the ratio of their rates within a round.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.benchmarks import baseline_worker
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.report import JsonFile, split_names, table_console, write_report
from anydecode.tasks.prompts import spread

ANYDECODE = "anydecode"
ROWS = (1, 2, 4, 8, 16, 32)
PREFILL_ROWS = 512
#: Seconds that an engine may take to load, and to answer one request.
LOAD_TIMEOUT, ANSWER_TIMEOUT = 600.0, 180.0


@dataclass
class BaselineResult:
    """Results of one engine.

    Attributes:
        engine: Name of the engine.
        version: Version of the engine.
        settings: Settings of the engine, as text.
        load_seconds: Time to load the model, in seconds.
        time_to_first_token: Median over rounds, in seconds.
        tokens_per_second: Median over rounds, after the first token.
        peak_memory: Largest resident set, in bytes.
        ratio: How many times this engine's rate anydecode's rate is; None if it was not measured.
        prompt_tokens: Tokens of all prompts.
        rates: Tokens per second of each round.
        firsts: Mean time to first token of each round, in seconds.
        rows: Seconds of a forward pass, by its number of rows.
    """

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
    """A running process of `baseline_worker.py`, or of another `file` with the same protocol.

    `missing` is the reason why the engine cannot run, or None. A process that takes longer than
    `timeout` seconds for an answer is killed. `environment` are more environment variables.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        python: str,
        file: str = baseline_worker.__file__,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        program = [python, file, engine, model, "--threads", str(threads)]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OPENVINO_TELEMETRY": "0",
            **(environment or {}),
        }
        self.engine = engine
        self.timeout = timeout
        self.process = subprocess.Popen(
            program,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello = self._read()
        self.missing: str | None = self.hello.get("missing")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.timeout)[0]:
            self.process.kill()
            return {"missing": f"{self.engine} gave no answer within {self.timeout:g} s"}
        line = self.process.stdout.readline()
        if not line:
            return {"missing": f"{self.engine} ended with exit code {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Close the pipes and wait for the process to exit."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


def start_workers(
    engines: Sequence[str],
    model: str,
    threads: int,
    python: str,
    stack: ExitStack,
    log: Callable[[str], None],
) -> list[Worker]:
    """Start one worker per baseline; `stack` closes them. Each one's status is passed to `log`."""
    workers = []
    for engine in engines:
        worker = Worker(engine, model, threads, python, timeout=LOAD_TIMEOUT)
        worker.timeout = ANSWER_TIMEOUT
        stack.callback(worker.close)
        status = f"loaded in {worker.hello.get('load_seconds', 0.0):.1f} s"
        log(f"{engine}: {worker.missing or status}")
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
    """Time `engines` on the GGUF file `model`. Returns the report for the tables and `--json`."""
    texts = [prompt.text for prompt in spread(prompts)]
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="anydecode-baselines-"))
        )
        workers = []
        for engine in engines:
            file = _model_file(engine, model, folder, python, missing)
            if file is None:
                continue
            own = engine == ANYDECODE
            worker = Worker(engine, file, threads, sys.executable if own else python)
            stack.callback(worker.close)
            if worker.missing is None:
                workers.append(worker)
            else:
                missing[engine] = worker.missing
        if ANYDECODE in missing or not workers:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
            raise InvalidRequestError(f"{model} cannot be measured: {reasons}")
        results = measure(workers, texts, tokens, rounds, missing)
        for worker in workers if rows else ():
            if worker.engine in results:
                results[worker.engine].rows = _row_costs(worker)
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


def _model_file(
    engine: str, model: str, folder: Path, python: str, missing: dict[str, str]
) -> str | None:
    """The file that an engine loads: the model's own, or one quantised by llama.cpp. None if
    quantising failed, with the reason in `missing`."""
    if engine != "llama.cpp-q4_0":
        return model
    target = folder / f"{Path(model).stem}-q4_0.gguf"
    command = [python, baseline_worker.__file__, "quantize", model, "--to", str(target)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode == 0:
        return str(target)
    missing[engine] = next(iter(process.stderr.splitlines()[-1:]), "quantising failed")
    return None


def measure(
    workers: list[Worker],
    texts: list[str],
    tokens: int,
    rounds: int,
    missing: dict[str, str],
) -> dict[str, BaselineResult]:
    """Run interleaved rounds after a warm-up. An engine that fails is moved to `missing`."""
    results: dict[str, BaselineResult] = {}
    samples: dict[str, list[list[dict[str, Any]]]] = {}
    for worker in workers:
        hello = worker.hello
        results[worker.engine] = BaselineResult(
            worker.engine, hello["version"], hello["settings"], hello["load_seconds"]
        )
        samples[worker.engine] = [[] for _ in range(rounds)]
        worker.ask(prompt=texts[0], tokens=min(tokens, 16))
    for round_index, text, worker in _interleaved(workers, texts, rounds):
        if worker.engine not in results:
            continue
        answer = worker.ask(prompt=text, tokens=tokens)
        if "missing" in answer:
            missing[worker.engine] = answer["missing"]
            del results[worker.engine]
        else:
            samples[worker.engine][round_index].append(answer)
    for engine, result in results.items():
        _fill(result, samples[engine])
    return results


def _interleaved(
    workers: list[Worker], texts: list[str], rounds: int
) -> Iterator[tuple[int, str, Worker]]:
    """The requests in order. Every prompt begins with a number of its own, so that no engine's
    prefix cache has it from an earlier round."""
    for round_index in range(rounds):
        for number, text in enumerate(texts):
            offset = (round_index + number) % max(len(workers), 1)
            prompt = f"{round_index * len(texts) + number + 1}. {text}"
            for worker in workers[offset:] + workers[:offset]:
                yield round_index, prompt, worker


def _fill(result: BaselineResult, rounds: list[list[dict[str, Any]]]) -> None:
    """Set the medians. A round's rate counts the tokens after each first one, and their time."""
    for answers in rounds:
        seconds = sum(answer["total"] - answer["first"] for answer in answers)
        result.rates.append(sum(answer["tokens"] - 1 for answer in answers) / seconds)
        result.firsts.append(statistics.mean(answer["first"] for answer in answers))
    result.tokens_per_second = statistics.median(result.rates)
    result.time_to_first_token = statistics.median(result.firsts)
    result.prompt_tokens = sum(answer["prompt_tokens"] for answer in rounds[0])
    result.peak_memory = max(answer["peak_memory"] for answers in rounds for answer in answers)


def _row_costs(worker: Worker) -> dict[str, float]:
    """Seconds of a forward pass over n rows at a context of 256 positions, and of a prefill; empty
    if the engine's passes cannot be timed."""
    if worker.engine not in baseline_worker.CAN_TIME_PASSES:
        return {}
    costs = worker.ask(rows=list(ROWS), context=256).get("rows", {})
    prefill = worker.ask(rows=[PREFILL_ROWS], context=0).get("rows", {})
    return {**costs, **prefill}


def add_ratios(results: dict[str, BaselineResult]) -> None:
    """Set each engine's `ratio`: the median over rounds of anydecode's rate over the engine's."""
    own = results.get(ANYDECODE)
    if own is None:
        return
    for result in results.values():
        pairs = zip(own.rates, result.rates, strict=True)
        result.ratio = statistics.median(own_rate / rate for own_rate, rate in pairs)


def print_report(report: dict[str, Any]) -> None:
    """Print the machine, the tables and the missing engines."""
    from rich.table import Table

    machine = report["machine"]
    console = table_console()
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
    if any("ModuleNotFoundError" in reason for reason in report["missing"].values()):
        console.print("to install other engines: pip install 'anydecode[baselines]'", markup=False)


def _print_rows(console: Any, report: dict[str, Any]) -> None:
    from rich.table import Table

    rows = [row for row in report["engines"] if row["rows"]]
    if not rows:
        return
    columns = [*map(str, ROWS), str(PREFILL_ROWS)]
    table = Table("ms of a pass over n rows", *columns[:-1], f"prefill {columns[-1]}", box=None)
    for row in rows:
        table.add_row(row["engine"], *(f"{row['rows'][column] * 1e3:.1f}" for column in columns))
    console.print(table)


def bench_baselines(
    model: Annotated[str, typer.Option("--model", "-m", help="A name or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    engines: Annotated[
        str, typer.Option("--engines", help="Names of engines, separated by commas.")
    ] = ",".join(baseline_worker.DEFAULT_ENGINES),
    threads: Annotated[
        int, typer.Option("--threads", help="CPU threads per engine; 0: every core.")
    ] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per prompt.")] = 128,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Number of prompts.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 3,
    rows: Annotated[
        bool, typer.Option("--rows", help="Also time forward passes over n rows.")
    ] = False,
    python: Annotated[
        str, typer.Option("--python", help="Python interpreter with the baselines installed.")
    ] = sys.executable,
    json_file: JsonFile = None,
) -> None:
    """Time this engine and baselines on one checkpoint, in one run.

    Example: anydecode bench baselines --tokens 128 --json baselines.json
    """
    chosen = split_names(engines)
    unknown = sorted(set(chosen) - set(baseline_worker.ENGINES))
    if unknown:
        allowed = ", ".join(baseline_worker.ENGINES)
        raise InvalidRequestError(f"unknown engines {', '.join(unknown)}; choose from {allowed}")
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
    """The `.gguf` file of `model`, which is a path or a name. Raises `InvalidRequestError` if it
    has none."""
    if Path(model).is_file():
        return model
    from anydecode.models.loading import resolve

    path = str(resolve(model))
    if not path.endswith(".gguf"):
        raise InvalidRequestError(f"{model} is not a .gguf file; baselines need one")
    return path

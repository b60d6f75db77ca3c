"""`anydecode bench reasoning`: how often the answers of decoding methods are right, and what they
cost in passes, rows, time and memory.

A method that computes more rows than plain decoding is compared with best-of-n and majority vote of
as many texts as take these rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.reasoning_tasks import BASELINES, Question, load_questions
from anydecode.machine import cpu_name, usable_cores
from anydecode.plots import COLOURS, figure, logarithmic
from anydecode.progress import progress
from anydecode.report import JsonFile, PlotFile, split_methods, table_console, write_report

#: The name of plain decoding at temperature 0 in reports.
GREEDY = "greedy"
#: The largest number of texts of a baseline.
MAX_TEXTS = 64
#: How often the number of texts of a baseline is corrected.
MAX_CORRECTIONS = 3
_METHODS = "autoregressive,majority-vote:n=4,best-of-n:n=4,beam,phi"


@dataclass(frozen=True)
class Result:
    """What a method achieves. Costs are means per question.

    Attributes:
        method: The decoder.
        right: Questions with a right answer.
        questions: Questions.
        accuracy: Their quotient.
        low: The lower end of its interval, of 95% (Wilson).
        high: The upper end.
        tokens: Tokens of the answer.
        passes: Passes with rows of the question.
        rows: Computed rows, those of the prompt included.
        seconds: Time of the whole batch, divided by its questions.
        cache_rows: Maximum number of positions of the batch in the caches of all models at a time,
            divided by its questions.
        cache_bytes: Their keys and values.
    """

    method: str
    right: int
    questions: int
    accuracy: float
    low: float
    high: float
    tokens: float
    passes: float
    rows: float
    seconds: float
    cache_rows: float
    cache_bytes: float


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's interval of 95% for a share."""
    z, share = 1.959964, right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = ((centre + sign * spread) / (1 + z * z / count) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def measure(
    llm: LLM,
    method: str,
    questions: Sequence[Question],
    max_tokens: int,
    temperature: float,
    seed: int = 0,
) -> Result:
    """Let a method answer all questions, which are decoded together, and check the answers."""
    is_greedy = method == GREEDY
    pools = [runner.pool for runner in llm.engine.runners.values()]
    for pool in pools:
        pool.max_used = pool.num_used
    begin = time.perf_counter()
    answers = llm.generate(
        [one.prompt for one in questions],
        decoder="autoregressive" if is_greedy else method,
        max_tokens=max_tokens,
        temperature=0.0 if is_greedy else temperature,
        stop=list(questions[0].stop),
        seed=seed,
    )
    seconds = time.perf_counter() - begin
    right = sum(one.is_right(answer.text) for one, answer in zip(questions, answers, strict=True))
    count = len(questions)
    stats = [answer.stats for answer in answers]
    return Result(
        method,
        right,
        count,
        right / count,
        *interval(right, count),
        tokens=sum(one.num_tokens for one in stats) / count,
        passes=sum(one.passes for one in stats) / count,
        rows=sum(one.rows for one in stats) / count,
        seconds=seconds / count,
        cache_rows=sum(pool.max_used for pool in pools) / count,
        cache_bytes=sum(pool.max_used * pool.bytes_per_slot for pool in pools) / count,
    )


def num_texts(rows: float, plain_rows: float, prompt_rows: float) -> int:
    """How many sampled texts have as many rows as a method, 1 to `MAX_TEXTS`; they share the
    prompt.

    Args:
        rows: Rows of the method.
        plain_rows: Rows of plain decoding.
        prompt_rows: Rows of the prompt, which are in both.
    """
    text = max(1.0, plain_rows - prompt_rows)
    return min(MAX_TEXTS, max(1, round((rows - prompt_rows) / text)))


def with_rows(
    rows: float, texts: int, prompt_rows: float, baseline: str, run: Callable[[str], Result]
) -> tuple[int, Result]:
    """The number of texts with which a baseline computes about as many rows as a method, and its
    result. Texts that begin alike share rows, so the number is corrected by what was computed.

    Args:
        rows: Rows of the method.
        texts: The first number of texts that is tried.
        prompt_rows: Rows of the prompt.
        baseline: Its decoder, with `{n}` for the number of texts.
        run: Measures a decoder.
    """
    found = run(baseline.format(n=texts))
    for _ in range(MAX_CORRECTIONS):
        better = num_texts(rows, prompt_rows + (found.rows - prompt_rows) / texts, prompt_rows)
        if better == texts:
            break
        texts, found = better, run(baseline.format(n=better))
    return texts, found


def bench_reasoning(
    task: Annotated[
        str, typer.Option("--task", help="gsm8k, human-eval or parallelbench.")
    ] = "parallelbench",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="The file with the questions of gsm8k or human-eval."),
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="Decoders, separated by commas between keys.")
    ] = _METHODS,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Name, folder or .gguf file.")
    ] = "smollm2-135m-instruct",
    draft: Annotated[
        str | None, typer.Option("--draft", help="A draft model, for methods that need one.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of questions.")] = 50,
    max_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Temperature of methods that sample.")
    ] = 0.7,
    equal: Annotated[
        bool,
        typer.Option(
            "--equal/--no-equal",
            help="Also measure best-of-n and majority vote with as many rows as each method.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of questions and answers.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure accuracy and cost of decoding methods on questions with checkable answers.

    Example: anydecode bench reasoning --task gsm8k --data test.jsonl --methods beam,phi
    """
    names = list(dict.fromkeys([GREEDY, *split_methods(methods)]))
    kinds = {baseline.partition(":")[0] for baseline in BASELINES.get(task, ())}
    with LLM(model, draft=draft, threads=threads or None, prefix_cache=False) as llm:
        questions = load_questions(task, data, count, seed, llm)
        prompt_rows = sum(len(one.prompt) for one in questions) / len(questions)
        measured: dict[str, Result] = {}
        with progress("methods") as bar:

            def run(name: str) -> Result:
                if name not in measured:
                    bar.begin(name)
                    measured[name] = measure(llm, name, questions, max_tokens, temperature, seed)
                    bar.update(len(measured))
                return measured[name]

            results = {name: run(name) for name in names}
            plain = results.get("autoregressive", results[GREEDY]).rows
            compared = [name for name in names if name.partition(":")[0] not in kinds]
            for name in compared if equal else ():
                rows = results[name].rows
                texts = num_texts(rows, plain, prompt_rows)
                for baseline in BASELINES[task] if texts > 1 else ():
                    texts, found = with_rows(rows, texts, prompt_rows, baseline, run)
                    results.setdefault(found.method, found)
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "model": model,
        "draft": draft,
        "task": task,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "prompt_rows": prompt_rows,
        "methods": [asdict(one) for one in results.values()],
    }
    if plot is not None:
        draw(report, plot)
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print one line per method, the cheapest first."""
    from rich.table import Table

    console = table_console()
    console.print(
        f"{report['model']}, {report['task']}, {report['methods'][0]['questions']} questions, up to"
        f" {report['max_tokens']} tokens, T={report['temperature']:g}; intervals of 95%"
    )
    table = Table(box=None)
    table.add_column("method", no_wrap=True)
    for name in (
        "accuracy", "interval", "tokens", "passes", "rows", "seconds", "cache rows", "cache MiB",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in sorted(report["methods"], key=lambda row: float(row["rows"])):
        table.add_row(
            row["method"],
            f"{row['accuracy']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['tokens']:.0f}",
            f"{row['passes']:.0f}",
            f"{row['rows']:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['cache_rows']:.0f}",
            f"{row['cache_bytes'] / 2**20:.2f}",
        )
    console.print(table)


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw accuracy, with its interval, against rows."""
    title = f"{report['task']}: right answers against computed rows per question"
    with figure(file, title, height=3.2) as [panel]:
        for number, row in enumerate(report["methods"]):
            spread = [[row["accuracy"] - row["low"]], [row["high"] - row["accuracy"]]]
            panel.errorbar(
                [row["rows"]],
                [row["accuracy"]],
                yerr=spread,
                fmt="os^D"[number // len(COLOURS) % 4],
                color=COLOURS[number % len(COLOURS)],
                label=row["method"],
            )
        panel.set(xlabel="rows per question", ylabel="accuracy")
        logarithmic(panel, "x")

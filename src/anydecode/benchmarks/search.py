"""`anydecode bench search`: what methods that continue one prompt in several ways cost: time per
step, positions in the cache, and rows beside the fewest that are possible.

The rows of a text depend on its tokens alone. So the fewest rows are the different beginnings of
texts that a method scores, and a method that shares every prefix computes no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import progress
from anydecode.report import JsonFile, split_methods, table_console, write_report
from anydecode.tasks.prompts import spread

METHODS = "beam:width=5,beam:width=8,diverse-beam,best-of-n:n=8,particle-filtering,adadec,deal,phi"
PLAIN = "autoregressive"


@dataclass(frozen=True)
class SearchResult:
    """What a method costs for one prompt.

    Attributes:
        method: The decoder.
        passes: Passes of the model, that of the prompt included.
        rows: Rows that it computed.
        distinct_rows: The fewest rows with which it could have scored the same texts.
        prompt_rows: Rows whose text is the prompt or a beginning of it. As keys and values are
            never copied, a prompt with one row for each token is stored once.
        cache_rows: Maximum number of positions in the cache at a time.
        milliseconds: Per pass behind the first token, the host's share included; the median.
        cost: The same, as a multiple of plain decoding's.
        processor_cost: Processor time per pass, as a multiple of plain decoding's: less changed by
            other work on the machine.
    """

    method: str
    passes: int
    rows: int
    distinct_rows: int
    prompt_rows: int
    cache_rows: int
    milliseconds: float
    cost: float
    processor_cost: float


class Prefixes:
    """The beginnings of texts whose last tokens are rows of passes.

    Args:
        prompt: The tokens of the prompt.

    Attributes:
        num_rows: Rows so far.
        num_prompt_rows: Those whose text is the prompt or a beginning of it.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self.num_rows = self.num_prompt_rows = 0
        self._of_prompt = {-1}  # numbers of beginnings
        self._numbers: dict[tuple[int, int], int] = {}  # of beginnings, by (the one before, token)
        self._of_slot: dict[int, int] = {}

    @property
    def num_distinct(self) -> int:
        """How many different beginnings there are."""
        return len(self._numbers)

    def add(self, rows: Rows) -> None:
        """Add the rows of a pass."""
        for row in range(len(rows)):
            slot, before = int(rows.slots[row]), -1
            tail = int(rows.tail_start[row])
            visible = [
                *rows.tables[rows.table[row]][: rows.prefix[row]][-2:].tolist(),
                *rows.tails[tail : tail + rows.tail_length[row]].tolist(),
            ]
            earlier = [one for one in visible[-2:] if one != slot]
            if rows.positions[row] > 0 and earlier:
                before = self._of_slot[earlier[-1]]
            token, position = int(rows.tokens[row]), int(rows.positions[row])
            number = self._numbers.setdefault((before, token), len(self._numbers))
            self._of_slot[slot] = number
            self.num_rows += 1
            if before in self._of_prompt and [token] == self.prompt[position : position + 1]:
                self._of_prompt.add(number)
                self.num_prompt_rows += 1


@contextmanager
def observed(model: Any, prompt: Sequence[int]) -> Iterator[Prefixes]:
    """The beginnings of texts that a model scores within it, see `Prefixes`."""
    prefixes, run = Prefixes(prompt), model.run

    def observing_run(rows: Rows, cache: Any, output_spec: OutputSpec) -> Any:
        prefixes.add(rows)
        return run(rows, cache, output_spec)

    model.run = observing_run
    try:
        yield prefixes
    finally:
        del model.run


def measure(
    llm: LLM, methods: Sequence[str], prompt: list[int], tokens: int, repeats: int
) -> Iterator[SearchResult]:
    """Yield the results of plain decoding, then those of each method.

    Args:
        llm: The model, without a prefix cache.
        methods: Decoders.
        prompt: The prompt.
        tokens: Tokens of each text, at least 2.
        repeats: How often each method is timed, plain decoding beside it.
    """
    options: dict[str, Any] = {"temperature": 1.0, "seed": 0, "ignore_eos": True}
    pool = llm.engine.runners["target"].pool

    def step(method: str) -> tuple[float, float]:
        """Milliseconds per pass behind the first token, on the clock and of the processor."""
        spent = []
        for count in (1, tokens):
            start = time.process_time()
            stats = llm.generate(prompt, decoder=method, max_tokens=count, **options).stats
            spent.append((stats.passes, stats.seconds, time.process_time() - start))
        passes, *seconds = (long - short for short, long in zip(*spent, strict=True))
        clock, processor = (1000 * one / max(1, passes) for one in seconds)
        return clock, processor

    for method in (PLAIN, *methods):
        pool.max_used = pool.num_used
        with observed(llm.model, prompt) as prefixes:
            stats = llm.generate(prompt, decoder=method, max_tokens=tokens, **options).stats
        times = [(*step(method), *step(PLAIN)) for _ in range(repeats)]
        yield SearchResult(
            method,
            stats.passes,
            prefixes.num_rows,
            prefixes.num_distinct,
            prefixes.num_prompt_rows,
            pool.max_used,
            median(one[0] for one in times),
            _ratio([(one[0], one[2]) for one in times]),
            _ratio([(one[1], one[3]) for one in times]),
        )


def _ratio(times: Sequence[tuple[float, float]]) -> float:
    """The median of the first times over that of the second ones."""
    own, plain = (median(one) for one in zip(*times, strict=True))
    return own / max(plain, 1e-9)


def bench_search(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder or .gguf file.")
    ] = "smollm2-135m-instruct",
    methods: Annotated[
        str, typer.Option("--methods", help="Decoders, separated by commas between keys.")
    ] = METHODS,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of the prompt.")
    ] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each text.")] = 32,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How often each method is timed.")
    ] = 5,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure time per step, peak of the cache, and rows of methods that write several texts.

    Example: anydecode bench search --methods beam:width=5,beam:width=8 --threads 2
    """
    with LLM(model, threads=threads or None, prefix_cache=False, draft="none") as llm:
        words = llm.encode(" ".join(one.text for one in spread(64)))
        prompt = (words * (prompt_tokens // len(words) + 1))[:prompt_tokens]
        results = []
        with progress("methods") as bar:
            for result in measure(llm, split_methods(methods), prompt, tokens, repeats):
                results.append(asdict(result))
                bar.update(len(results))
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "model": model,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "methods": results,
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print one line per method."""
    from rich.table import Table

    console = table_console()
    console.print(
        f"{report['model']}, a prompt of {report['prompt_tokens']} tokens, texts of"
        f" {report['tokens']}; {report['machine']['cpu']}, {report['machine']['cores']} cores"
    )
    table = Table(box=None)
    table.add_column("method", no_wrap=True)
    for name in (
        "passes", "rows", "fewest rows", "ratio", "prompt computed", "cache rows", "ms per pass",
        "of plain", "processor",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in report["methods"]:
        table.add_row(
            row["method"],
            str(row["passes"]),
            str(row["rows"]),
            str(row["distinct_rows"]),
            f"{row['rows'] / row['distinct_rows']:.3f}",
            f"{row['prompt_rows'] / report['prompt_tokens']:.2f}x",
            str(row["cache_rows"]),
            f"{row['milliseconds']:.2f}",
            f"{row['cost']:.2f}x",
            f"{row['processor_cost']:.2f}x",
        )
    console.print(table)

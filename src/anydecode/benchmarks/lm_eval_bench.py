"""`anydecode bench lm-eval`: tasks of lm-eval, with formats of weights and of the key-value cache,
beside llama.cpp.

All engines read the same file and the same token ids. The difference between two engines is that of
their values on the same documents, so its error is much smaller than that of the values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.baselines import find_file
from anydecode.benchmarks.llama_cpp_baseline import DEFAULT_CACHE, LlamaCpp
from anydecode.errors import AnydecodeError, InvalidRequestError, MissingPackageError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import note
from anydecode.report import JsonFile, split_names, table_console, with_error, write_report

if TYPE_CHECKING:
    from anydecode.integrations.lm_eval import AnydecodeLM

#: Metrics of log-likelihoods, by which lm-eval computes an exponential or a sum: what is printed
#: instead of them, a mean per document, word or byte, and its factor.
_LOGARITHMS = {
    "perplexity": ("nats per answer", 1.0),
    "word_perplexity": ("nats per word", 1.0),
    "byte_perplexity": ("nats per byte", 1.0),
    "bits_per_byte": ("bits per byte", 1 / math.log(2)),
}


class Values(NamedTuple):
    """A metric by document: `values` sum to the numerator of its mean, and `weights` to the
    denominator; float64 `[documents]`. `answers` are what the engine chose or wrote, if it did."""

    values: np.ndarray
    weights: np.ndarray
    answers: list[Any]


def mean_and_error(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """The weighted mean of documents' values, and its standard error; NaN for one document."""
    mean = float(values.sum() / weights.sum())
    count = len(values)
    if count < 2:
        return mean, float("nan")
    spread = float(((values - mean * weights) ** 2).sum()) * count / (count - 1)
    return mean, spread**0.5 / float(weights.sum())


def metrics_of(samples: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Values]]:
    """The metrics of a task, from lm-eval's samples, each under the name that is printed."""
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda one: one["doc_id"]):
        by_filter.setdefault(sample["filter"], []).append(sample)
    for found in by_filter.values():
        answers = [_answer(sample["resps"]) for sample in found]
        for metric in found[0]["metrics"]:
            name, factor = _LOGARITHMS.get(metric, (metric, None))
            pairs = np.array(
                [
                    one if isinstance(one, (tuple, list)) else (one, 1.0)
                    for one in (sample[metric] for sample in found)
                ],
                np.float64,
            )
            values = pairs[:, 0] if factor is None else -factor * pairs[:, 0]
            yield name, Values(values, pairs[:, 1], answers)


def _answer(responses: Sequence[Sequence[Any]]) -> Any:
    """What an engine chose or wrote: a text, the number of a choice, whether a continuation is the
    greedy one; None for the likelihood of a text."""
    first = [one[0] for one in responses]
    if isinstance(first[0], str):
        return first
    if not isinstance(first[0], (tuple, list)):
        return None
    return int(np.argmax([one[0] for one in first])) if len(first) > 1 else bool(first[0][1])


def evaluate(lm: Any, tasks: list[str], manager: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """The metrics of all tasks, by task and name. Raises `InvalidRequestError` where lm-eval
    does."""
    import lm_eval

    try:
        report = lm_eval.simple_evaluate(
            model=lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
        )
    except AnydecodeError:
        raise
    except (KeyError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"lm-eval: {type(error).__name__}: {reason}") from None
    return {name: dict(metrics_of(samples)) for name, samples in report["samples"].items()}


def llama_cpp_model(own: AnydecodeLM, baseline: LlamaCpp) -> AnydecodeLM:
    """llama.cpp as a model of lm-eval, with the tokens and limits of `own`."""
    from anydecode.integrations.lm_eval import AnydecodeLM, is_sampled, stops

    class LlamaCppLM(AnydecodeLM):
        def likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
            found = baseline.ask("scores", pairs=pairs) if pairs else []
            return [(total, greedy) for total, greedy in found]

        def texts(
            self, prompts: list[list[int]], count: int, settings: dict[str, Any]
        ) -> list[str]:
            if is_sampled(settings):
                raise InvalidRequestError("tasks that sample are not compared with llama.cpp")
            found: list[str] = baseline.ask(
                "texts", prompts=prompts, count=count, stops=stops(settings)
            )
            return found

    return LlamaCppLM(own.llm, max_length=own.max_length)


def compare(
    path: str,
    cache: str | None,
    baseline: str | None,
    threads: int,
    context: int,
    tasks: list[str],
    manager: Any,
    **options: Any,
) -> list[dict[str, Any]]:
    """Evaluate one file with one format of the cache; a row of the report for each metric."""
    from anydecode.integrations.lm_eval import AnydecodeLM

    with LLM(path, cache=cache, threads=threads) as llm:
        lm = AnydecodeLM(llm, max_length=context)
        note(f"{Path(path).name}: anydecode")
        own = evaluate(lm, tasks, manager, **options)
        other = None
        if baseline:
            note(f"{Path(path).name}: llama.cpp")
            engine = LlamaCpp(baseline, path, threads, cache or DEFAULT_CACHE)
            other = evaluate(llama_cpp_model(lm, engine), tasks, manager, **options)
    return [
        {
            "model": Path(path).name,
            "cache": cache,
            "task": task,
            "metric": name,
            "documents": len(values.values),
            **figures(values, other[task][name] if other else None),
        }
        for task, metrics in own.items()
        for name, values in metrics.items()
    ]


def figures(own: Values, other: Values | None) -> dict[str, Any]:
    """A metric of anydecode as [mean, standard error]; beside llama.cpp also its metric, the
    difference between both, and the share of equal answers (None for likelihoods of texts)."""
    found: dict[str, Any] = {"anydecode": mean_and_error(own.values, own.weights)}
    if other is not None:
        found["llama.cpp"] = mean_and_error(other.values, other.weights)
        found["difference"] = mean_and_error(own.values - other.values, own.weights)
        equal = [a == b for a, b in zip(own.answers, other.answers, strict=True)]
        found["same answers"] = None if own.answers[0] is None else float(np.mean(equal))
    return found


def bench_lm_eval(
    models: Annotated[
        str, typer.Option("--models", help="Names or .gguf files, separated by commas.")
    ],
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks of lm-eval, separated by commas.")],
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="A folder with further tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Documents of each task; default: all.")
    ] = None,
    caches: Annotated[
        str,
        typer.Option("--caches", help="Formats of the key-value cache, separated by commas."),
    ] = "",
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="A Python interpreter with llama-cpp-python."),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=2, help="Maximum number of tokens of a request.")
    ] = 2048,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write prompts with the model's chat template.")
    ] = False,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads per engine; 0: all cores.")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Evaluate models, or formats of one, on tasks of lm-eval, beside llama.cpp.

    Example: anydecode bench lm-eval --models q4.gguf,q8.gguf --tasks gsm8k_text --limit 100
    --include-path examples/lm_eval
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingPackageError("bench lm-eval", "lm-eval", "'anydecode[eval]'") from None
    if include_path is not None and not include_path.is_dir():
        raise InvalidRequestError(f"--include-path {include_path} is not a folder")
    names, chosen = split_names(models), split_names(tasks)
    if not (names and chosen):
        raise InvalidRequestError("give at least one model and one task")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=include_path and str(include_path))
    rows: list[dict[str, Any]] = []
    for name in names:
        for cache in split_names(caches) or (None,):
            rows += compare(
                find_file(name) if baseline else name,
                cache,
                baseline,
                threads or usable_cores(),
                context,
                chosen,
                manager,
                limit=limit,
                apply_chat_template=chat,
            )
    report = {"machine": {"cpu": cpu_name()}, "lm-eval": lm_eval.__version__, "rows": rows}
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print one line per model, cache and metric."""
    from rich.table import Table

    engines = [name for name in ("anydecode", "llama.cpp") if name in report["rows"][0]]
    table = Table(box=None)
    for name in ("model", "cache", "task", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("documents", *engines, *(("difference", "same answers") if engines[1:] else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["rows"]:
        cells = [row["model"], row["cache"] or "default", row["task"], row["metric"]]
        cells += [str(row["documents"]), *(with_error(row[name]) for name in engines)]
        if engines[1:]:
            same = row["same answers"]
            cells += [with_error(row["difference"]), "" if same is None else f"{same:.1%}"]
        table.add_row(*cells)
    table_console().print(table)

"""`anydecode bench divergence`: the error of formats of weights and of the cache, and of quantised
arithmetic, as the Kullback-Leibler divergence per token of anydecode and llama.cpp from weights in
float32: the same weights dequantised, or those of another file.

All engines read the same file and the same token ids, window by window from an empty context.
llama.cpp runs in another Python interpreter, and its logits are returned through a file.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from anydecode.benchmarks.baselines import find_file
from anydecode.benchmarks.llama_cpp_baseline import DEFAULT_CACHE, LlamaCpp
from anydecode.benchmarks.lm_eval_bench import mean_and_error
from anydecode.benchmarks.passes import first_logits, sequence_rows
from anydecode.errors import InvalidRequestError
from anydecode.kernels.host import to_host
from anydecode.machine import cpu_name, usable_cores
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.progress import note
from anydecode.report import JsonFile, split_names, table_console, with_error, write_report
from anydecode.tasks.prompts import PROMPTS


def windows(tokenizer: Any, text: str, count: int, size: int) -> list[list[int]]:
    """The first `count` token ids of `text`, split into windows of `size`."""
    ids = tokenizer.encode(text)[:count]
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def logits_of(model: Any, ids: list[int], cache: str | None = None) -> np.ndarray:
    """Logits float32 `[len(ids), vocab_size]` of one window, from one forward pass. `cache` is the
    format of the key-value cache; None: the model's own."""
    rows = sequence_rows(ids, 0, model.spec.num_layers)
    slots = model.new_cache(len(ids), cache) if cache else model.new_cache(len(ids))
    output = model.run(rows, slots, first_logits(len(ids)))
    return to_host(output.logits).copy()


def baseline_logits(baseline: LlamaCpp, ids: list[list[int]]) -> np.ndarray:
    """Logits of all windows from llama.cpp, concatenated."""
    with tempfile.TemporaryDirectory(prefix="anydecode-divergence-") as folder:
        target = Path(folder, "logits.npy")
        baseline.ask("logits", windows=ids, target=str(target))
        logits: np.ndarray = np.load(target)
    return logits


def divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || other) of each row in nats, float64 `[rows]`."""
    result = np.empty(len(reference))
    for row, (one, other) in enumerate(zip(reference, logits, strict=True)):
        p, q = (_log_softmax(values.astype(np.float64)) for values in (one, other))
        result[row] = (np.exp(p) * (p - q)).sum()
    return result


def _log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max()
    shifted: np.ndarray = values - np.log(np.exp(values).sum())
    return shifted


class Quality(NamedTuple):
    """How near an engine's logits are to the text and to the reference, token by token.

    Attributes:
        divergences: KL(reference || engine) of each row in nats, float64 `[rows]`.
        losses: The negative log-likelihood in nats of the next token of each row that has one in
            its window, float64; its mean's exponential is the perplexity.
        same_top_token: The share of rows whose most probable token is that of the reference.
    """

    divergences: np.ndarray
    losses: np.ndarray
    same_top_token: float

    def summary(self) -> dict[str, float]:
        """Statistics over all rows."""
        values = self.divergences
        mean, error = _mean_and_error(values)
        return {
            "mean": mean,
            "standard_error": error,
            "median": float(np.median(values)),
            "99%": float(np.quantile(values, 0.99)),
            "largest": float(values.max()),
            "same_top_token": self.same_top_token,
            "loss": float(self.losses.mean()),
        }


def losses(logits: np.ndarray, ids: list[list[int]]) -> np.ndarray:
    """The negative log-likelihood of each next token (see `Quality`), float64."""
    following = [token for window in ids for token in (*window[1:], -1)]
    return np.array(
        [
            -_log_softmax(row.astype(np.float64))[token]
            for row, token in zip(logits, following, strict=True)
            if token >= 0
        ]
    )


class Reference(NamedTuple):
    """Logits float32 `[rows, vocab_size]` of a file's weights in float32, and the tokens of each
    window."""

    name: str
    ids: list[list[int]]
    logits: np.ndarray


@functools.lru_cache(maxsize=1)  # of all files with the same reference
def reference_of(path: str, text: str, tokens: int, window: int, threads: int) -> Reference:
    """Compute the logits of the file `path` on the first tokens of a text. Raises
    `InvalidRequestError` if it has fewer than two."""
    checkpoint = load_checkpoint(path)
    ids = windows(checkpoint.tokenizer, text, tokens, window)
    if max(map(len, ids), default=0) < 2:
        raise InvalidRequestError("the text has fewer than two tokens; give another --text")
    model = build_model(checkpoint, "float32", executor=choose_executor(threads=threads))
    return Reference(Path(path).name, ids, _all_logits(model, ids))


def quality(reference: Reference, logits: np.ndarray) -> Quality:
    """An engine's logits `[rows, vocab_size]` beside those of the reference."""
    same = float((reference.logits.argmax(-1) == logits.argmax(-1)).mean())
    return Quality(divergences(reference.logits, logits), losses(logits, reference.ids), same)


def compare(
    path: str,
    text: str,
    tokens: int,
    window: int,
    baseline: str | None,
    threads: int,
    backend: str | None,
    reference: str | None = None,
    caches: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure all engines on a file and return its part of the report.

    Args:
        path: The file that all engines read.
        text: The text.
        tokens: The number of its tokens.
        window: Tokens per window.
        baseline: A Python interpreter with llama-cpp-python.
        threads: The number of threads of each engine.
        backend: The kernels of anydecode; None: the best available.
        reference: The model whose weights in float32 are the reference; None: that of `path`.
        caches: Formats of the key-value cache, of all engines; none: each engine's own choice.

    Raises:
        InvalidRequestError: The kernels lack a format of the cache, or the reference has another
            vocabulary.
    """
    own = build_model(load_checkpoint(path), executor=choose_executor(backend, threads))
    for cache in caches:
        if cache not in own.cache_formats:
            raise InvalidRequestError(
                f"--caches {cache}: choose from {', '.join(own.cache_formats)}"
            )
    exact = reference_of(reference or path, text, tokens, window, threads)
    width = exact.logits.shape[1]
    if width != own.spec.vocab_size:
        raise InvalidRequestError(
            f"--reference {reference} has {width} tokens, and {path} {own.spec.vocab_size};"
            " give another format of the same model"
        )
    name = f"anydecode, {type(own.executor).__name__}"
    engines: dict[str, Quality] = {}
    for format in caches or (None,):
        logits = _all_logits(own, exact.ids, format)
        engines[name + _of_cache(format)] = quality(exact, logits)
    pairs = []
    if baseline:
        for format, mine in zip(caches or (None,), list(engines.values()), strict=True):
            note(f"{Path(path).name}{_of_cache(format)}: llama.cpp")
            other = LlamaCpp(baseline, path, threads, format or DEFAULT_CACHE)
            theirs = quality(exact, baseline_logits(other, exact.ids)[:, :width])
            engines[f"{other.version}{_of_cache(format)}"] = theirs
            pairs.append(_pair(format or DEFAULT_CACHE, mine, theirs))
    return {
        "model": Path(path).name,
        "reference": exact.name,
        "tokens": len(exact.logits),
        "loss": float(losses(exact.logits, exact.ids).mean()),
        "engines": {engine: found.summary() for engine, found in engines.items()},
        "beside_llama_cpp": pairs,
    }


def _pair(cache: str, own: Quality, other: Quality) -> dict[str, Any]:
    """Both engines on the same tokens with the same cache; each difference has the error of the
    differences by token."""
    return {
        "cache": cache,
        "perplexity": [float(np.exp(one.losses.mean())) for one in (own, other)],
        "loss_difference": _mean_and_error(own.losses - other.losses),
        "divergence": [_mean_and_error(one.divergences) for one in (own, other)],
        "divergence_difference": _mean_and_error(own.divergences - other.divergences),
    }


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return mean_and_error(values, np.ones(len(values)))


def _of_cache(cache: str | None) -> str:
    return f", {cache} cache" if cache else ""


def _all_logits(model: Any, ids: list[list[int]], cache: str | None = None) -> np.ndarray:
    return np.concatenate([logits_of(model, window, cache) for window in ids])


def show(report: dict[str, Any]) -> None:
    """Print the report: a table for each file, and one of all files beside llama.cpp."""
    for result in report["models"]:
        print(
            f"{result['model']}, {result['tokens']} tokens in windows of {report['window']}, on"
            f" {report['machine']}: divergence from {result['reference']} in float32 (whose loss is"
            f" {result['loss']:.4f}), in nats"
        )
        _show_engines(result["engines"])
    if any(result["beside_llama_cpp"] for result in report["models"]):
        _show_pairs(report["models"])


def _show_engines(engines: dict[str, dict[str, float]]) -> None:
    titles = f"{'mean':>9} {'+-':>8} {'median':>9} {'99%':>9} {'largest':>9}"
    print(f"{'':42} {titles}  same top token   loss")
    for name, statistics in engines.items():
        numbers = (
            statistics[key] for key in ("mean", "standard_error", "median", "99%", "largest")
        )
        cells = " ".join(
            f"{value:{width}.5f}" for value, width in zip(numbers, (9, 8, 9, 9, 9), strict=True)
        )
        print(f"{name:42} {cells} {statistics['same_top_token']:15.1%} {statistics['loss']:.4f}")


def _show_pairs(models: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("model", "cache", box=None)
    for name in (
        *("perplexity", "of llama.cpp", "difference in nats"),
        *("divergence", "of llama.cpp", "difference"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in models:
        for pair in result["beside_llama_cpp"]:
            table.add_row(
                result["model"],
                pair["cache"],
                *(f"{value:.3f}" for value in pair["perplexity"]),
                with_error(pair["loss_difference"]),
                *(with_error(value) for value in pair["divergence"]),
                with_error(pair["divergence_difference"]),
            )
    table_console().print(table)


def bench_divergence(
    models: Annotated[
        str,
        typer.Option("--models", "-m", help="Names or .gguf files, separated by commas."),
    ] = "smollm2-135m-instruct",
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file; default: the package's prompts.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text.")] = 512,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens of a window.")] = 256,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="A Python interpreter with llama-cpp-python."),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads per engine; 0: all cores.")
    ] = 0,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="native, torch or triton; default: the best available."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            help="The model whose weights are exact, in float32; default: each of --models.",
        ),
    ] = None,
    caches: Annotated[
        str,
        typer.Option("--caches", help="Formats of the key-value cache, separated by commas."),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Compare logits with those of the same weights in float32, or of another file's weights; with
    --baseline beside llama.cpp's on the same tokens.

    Example: anydecode bench divergence --models q4.gguf,q8.gguf --reference f16.gguf
    --caches float16,int8
    """
    if text is not None and not text.is_file():
        raise InvalidRequestError(f"--text {text} is not a file")
    words = "\n\n".join(p.text for p in PROMPTS) if text is None else text.read_text("utf-8")
    count = threads or usable_cores()
    chosen = [find_file(name) for name in split_names(models)]
    if not chosen:
        raise InvalidRequestError("give at least one model")
    formats = split_names(caches) if caches else ()
    results = []
    for path in chosen:
        note(f"{Path(path).name}: anydecode")
        results.append(
            compare(path, words, tokens, window, baseline, count, backend, reference, formats)
        )
    report = {"machine": cpu_name(), "window": window, "models": results}
    write_report(report, json_file, lambda: show(report))

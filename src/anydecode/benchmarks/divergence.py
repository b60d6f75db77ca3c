"""`anydecode bench divergence`: the error of formats of weights and of the cache, and of quantised
arithmetic, as the Kullback-Leibler divergence per token of anydecode and llama.cpp from weights in
float32: the same weights dequantised, or those of another file.

All engines read the same file and the same token ids, window by window from an empty context.
llama.cpp runs in another Python interpreter, and its logits are returned through a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.benchmarks.baselines import find_file
from anydecode.benchmarks.llama_cpp_baseline import DEFAULT_CACHE, LlamaCpp
from anydecode.benchmarks.passes import first_logits, sequence_rows
from anydecode.errors import InvalidRequestError
from anydecode.kernels.host import to_host
from anydecode.machine import cpu_name, usable_cores
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.report import JsonFile, split_names, write_report
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


def summary(reference: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Statistics of the divergences over all rows."""
    values = divergences(reference, logits)
    return {
        "mean": float(values.mean()),
        "standard_error": float(values.std(ddof=1) / len(values) ** 0.5),
        "median": float(np.median(values)),
        "99%": float(np.quantile(values, 0.99)),
        "largest": float(values.max()),
        "same_top_token": float((reference.argmax(-1) == logits.argmax(-1)).mean()),
    }


def loss(logits: np.ndarray, ids: list[list[int]]) -> float:
    """The mean negative log-likelihood, in nats, of the next token of each row that has one in its
    window; its exponential is the perplexity. NaN where no row has one."""
    following = [token for window in ids for token in (*window[1:], -1)]
    values = [
        -_log_softmax(row.astype(np.float64))[token]
        for row, token in zip(logits, following, strict=True)
        if token >= 0
    ]
    return float(np.mean(values)) if values else float("nan")


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
    """Measure all engines and return the report.

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
    exact = load_checkpoint(reference or path)
    ids = windows(exact.tokenizer, text, tokens, window)
    model = build_model(exact, "float32", executor=choose_executor(threads=threads))
    if model.spec.vocab_size != own.spec.vocab_size:
        raise InvalidRequestError(
            f"--reference {reference} has {model.spec.vocab_size} tokens, and {path}"
            f" {own.spec.vocab_size}; give another format of the same model"
        )
    expected = _all_logits(model, ids)
    name = f"anydecode, {type(own.executor).__name__}"
    engines = {name + _of_cache(cache): _all_logits(own, ids, cache) for cache in caches or (None,)}
    if baseline:
        for format in caches or (None,):
            other = LlamaCpp(baseline, path, threads, format or DEFAULT_CACHE)
            logits = baseline_logits(other, ids)[:, : expected.shape[1]]
            engines[f"{other.version}{_of_cache(format)}"] = logits
    return {
        "machine": cpu_name(),
        "model": Path(path).name,
        "reference": Path(reference or path).name,
        "tokens": len(expected),
        "window": window,
        "loss": loss(expected, ids),
        "engines": {
            name: {**summary(expected, logits), "loss": loss(logits, ids)}
            for name, logits in engines.items()
        },
    }


def _of_cache(cache: str | None) -> str:
    return f", {cache} cache" if cache else ""


def _all_logits(model: Any, ids: list[list[int]], cache: str | None = None) -> np.ndarray:
    return np.concatenate([logits_of(model, window, cache) for window in ids])


def show(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(
        f"{result['model']}, {result['tokens']} tokens in windows of {result['window']}, on"
        f" {result['machine']}: divergence from {result['reference']} in float32 (whose loss is"
        f" {result['loss']:.4f}), in nats"
    )
    titles = f"{'mean':>9} {'+-':>8} {'median':>9} {'99%':>9} {'largest':>9}"
    print(f"{'':42} {titles}  same top token   loss")
    for name, statistics in result["engines"].items():
        numbers = (
            statistics[key] for key in ("mean", "standard_error", "median", "99%", "largest")
        )
        cells = " ".join(
            f"{value:{width}.5f}" for value, width in zip(numbers, (9, 8, 9, 9, 9), strict=True)
        )
        print(f"{name:42} {cells} {statistics['same_top_token']:15.1%} {statistics['loss']:.4f}")


def bench_divergence(
    model: Annotated[str, typer.Option("--model", "-m", help="A name or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file; default: the package's prompts.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text.")] = 512,
    window: Annotated[int, typer.Option("--window", min=1, help="Tokens of a window.")] = 256,
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
            "--reference", help="The model whose weights are exact, in float32; default: --model."
        ),
    ] = None,
    caches: Annotated[
        str,
        typer.Option("--caches", help="Formats of the key-value cache, separated by commas."),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Compare logits with those of the same weights in float32, or of another file's weights.

    Example: anydecode bench divergence --tokens 512 --window 256 --caches float16,int8,int4
    """
    if text is not None and not text.is_file():
        raise InvalidRequestError(f"--text {text} is not a file")
    words = "\n\n".join(p.text for p in PROMPTS) if text is None else text.read_text("utf-8")
    count = threads or usable_cores()
    result = compare(
        find_file(model),
        words,
        tokens,
        window,
        baseline,
        count,
        backend,
        reference,
        split_names(caches) if caches else (),
    )
    write_report(result, json_file, lambda: show(result))

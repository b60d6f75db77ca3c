"""`anydecode bench perplexity`: how well models, or formats of one, predict a text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name
from anydecode.models.loading import resolve
from anydecode.report import JsonFile, split_names, table_console, write_report


@dataclass(frozen=True)
class Result:
    """How a model predicts the text.

    Attributes:
        model: Its name.
        num_bytes: Bytes of its file, or of the files in its folder.
        tokens: Predicted tokens.
        nats: Mean negative log-likelihood of a token.
        perplexity: The exponential of `nats`.
    """

    model: str
    num_bytes: int
    tokens: int
    nats: float
    perplexity: float


def measure(model: str, text: str, window: int, limit: int, threads: int | None = None) -> Result:
    """Predict a text in windows that do not overlap, of which the first token is not predicted.

    Args:
        model: A name, a folder or a file.
        text: The text.
        window: Tokens per window.
        limit: Maximum number of windows.
        threads: The number of threads; None: every core.

    Raises:
        InvalidRequestError: The text has fewer than two tokens.
    """
    with LLM(model, threads=threads) as llm:
        tokens = llm.tokenizer.encode(text)[: window * limit]
        starts = range(0, len(tokens) - 1, window)
        if not starts:
            raise InvalidRequestError("the text has fewer than two tokens")
        results = llm.scores([(tokens[i : i + 1], tokens[i + 1 : i + window]) for i in starts])
    count = sum(len(result.tokens) for result in results)
    nats = -sum(result.total for result in results) / count
    path = resolve(model)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return Result(Path(model).name, size, count, nats, math.exp(nats))


def bench_perplexity(
    models: Annotated[
        str, typer.Option("--models", help="Names, folders or .gguf files, separated by commas.")
    ],
    text: Annotated[Path, typer.Option("--text", help="A file with a text.")],
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens per window.")] = 256,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of windows.")] = 64,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the perplexity of a text under several models, or one model in several formats.

    Example: anydecode bench perplexity --models q4.gguf,ptq161.gguf --text held-out.txt
    """
    try:
        content = text.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{text} cannot be read: {error}") from None
    chosen = split_names(models)
    if not chosen:
        raise InvalidRequestError("give at least one model")
    results = [measure(name, content, window, limit, threads or None) for name in chosen]
    report = {
        "machine": {"cpu": cpu_name()},
        "text": text.name,
        "window": window,
        "models": [asdict(result) for result in results],
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print one line per model."""
    from rich.table import Table

    table = Table(box=None)
    table.add_column("model", no_wrap=True)
    for name in ("MB", "tokens", "nats", "perplexity"):
        table.add_column(name, justify="right")
    for row in report["models"]:
        table.add_row(
            row["model"],
            f"{row['num_bytes'] / 1e6:.1f}",
            str(row["tokens"]),
            f"{row['nats']:.4f}",
            f"{row['perplexity']:.2f}",
        )
    table_console().print(table)

"""`anydecode score`: the log-likelihood of a continuation."""

from __future__ import annotations

from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.serialization import to_plain


def score(
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", "-p", help="Text before the continuation; - reads standard input."
        ),
    ],
    continuation: Annotated[
        str,
        typer.Option("--continuation", "-c", help="Text that is scored; - reads standard input."),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    json: options.Json = False,
) -> None:
    """Print the log-likelihood of a continuation, in nats.

    Example: anydecode score --prompt "The sky is" --continuation " blue"
    """
    prompt = options.read_text(prompt, "prompt")
    llm = options.load(model, dtype, threads, backend, None, cache)
    result = llm.score(prompt, options.read_text(continuation, "continuation"))
    if json:
        print_json({"model": model, **to_plain(result)})
        return
    print(f"{result.total:.4f}")

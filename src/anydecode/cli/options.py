"""Options that several commands share, and how they become arguments of the Python API."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.errors import InvalidRequestError

if TYPE_CHECKING:
    from anydecode import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="ANYDECODE_MODEL",
        help="A name, a Hugging Face repo id, a folder or a .gguf file.",
    ),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        "--decoder",
        "-d",
        help="A key of `anydecode methods`; key:name=value,... sets it up. Default: auto, or what a"
        " diffusion model was made for.",
    ),
]
Sampler = Annotated[
    list[str] | None,
    typer.Option(
        "--sampler", help="A sampling rule of `anydecode methods`, as mirostat:tau=4; repeatable."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="At most this many new tokens.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to p.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Keep tokens at least p times the likeliest.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16, int8 or int4; as stored if absent."),
]
Cache = Annotated[
    str | None,
    typer.Option("--cache", help="Keys and values as float32, float16, bfloat16, int8 or int4."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]
Backend = Annotated[
    str | None, typer.Option("--backend", help="Which kernels to use; the best found if absent.")
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", help="A smaller model for methods that want one; self:int4 thins it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def given(**values: Any) -> dict[str, Any]:
    """Only what the user gave, so that the API's own defaults hold for the rest."""
    return {name: value for name, value in values.items() if value is not None}


def load(
    model: str,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    draft: str | None = None,
    cache: str | None = None,
) -> LLM:
    """The model, with a note on stderr while it loads."""
    from anydecode import LLM
    from anydecode.cli.output import status

    with status(f"loading {model}"):
        chosen = given(dtype=dtype, threads=threads, backend=backend, draft=draft, cache=cache)
        return LLM(model, **chosen)


def read_text(value: str | None, what: str) -> str:
    """`-` stands for standard input. Raises InvalidRequestError where there is nothing to read."""
    if value == "-":
        value = sys.stdin.read()
    if not value:
        raise InvalidRequestError(f"no {what}: give one with --{what}, or --{what} - for stdin")
    return value

"""`anydecode serve`: the engine over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.errors import InvalidRequestError


def known_as(model: str) -> str:
    """A model's name to clients: a path's last part says enough, and no more."""
    path = Path(model)
    return path.stem if path.is_file() else path.name if path.is_dir() else model


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            envvar="ANYDECODE_MODEL",
            help="A name, a Hugging Face repo id, a folder or a .gguf file.",
        ),
    ] = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen; others reach 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The port.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name to clients; MODEL if absent.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="ANYDECODE_API_KEYS",
            help="Ask for this key; repeatable. Each key has a cache of its own.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A further name to answer to; repeatable; *: any."),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="/metrics and /live without a key.")
    ] = False,
    decoder: options.Decoder = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="A serving key of `anydecode methods`.")
    ] = None,
    drafting: Annotated[
        str | None,
        typer.Option("--drafting", help="Who says how much all may draft: smartspec-server."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="A smaller model, for methods that want one.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="A LoRA adapter; repeatable."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Requests at work at a time.")
    ] = 256,
    max_prompt: Annotated[
        int, typer.Option("--max-prompt", min=0, help="Longest prompt in tokens; 0: what fits.")
    ] = 0,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1024, help="Largest body in bytes.")
    ] = 4 << 20,
    drain: Annotated[
        float, typer.Option("--drain", min=0, help="Seconds a shutdown waits for answers.")
    ] = 10.0,
    cache_positions: Annotated[
        int | None, typer.Option("--cache-positions", min=1, help="Size of the key-value cache.")
    ] = None,
    prefix_spill: Annotated[
        str | None,
        typer.Option(
            "--prefix-spill",
            metavar="DIR",
            help="Keep evicted prefixes in this folder (or in 'memory').",
        ),
    ] = None,
    spill_limit: Annotated[
        str, typer.Option("--spill-limit", help="Most bytes of them: 512MiB, 4g.")
    ] = "4GiB",
    row_budget: Annotated[
        int, typer.Option("--row-budget", min=1, help="Most rows of a pass.")
    ] = 512,
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="auto, hermes, mistral, llama or none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option("--reasoning-parser", help="auto, think, seed or none.")
    ] = "auto",
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
) -> None:
    """Serve a model in OpenAI's API, with a page to try it at /.

    Example: anydecode serve smollm2-135m-instruct --port 8000
    """
    from anydecode import LLM
    from anydecode.cli.output import status
    from anydecode.server.running import serve as run
    from anydecode.server.settings import Settings

    settings = Settings(
        name=name or known_as(model),
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        max_body=max_body,
        max_prompt=max_prompt,
        max_requests=max_requests,
        drain_seconds=drain,
        decoder=decoder,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        allowed_hosts=tuple(name.lower() for name in allow_host or ()),
        open_metrics=open_metrics,
    )
    engine = options.given(
        dtype=dtype,
        cache=cache,
        threads=threads,
        backend=backend,
        draft=draft,
        schedule=schedule,
        drafting=drafting,
        cache_positions=cache_positions,
        prefix_spill=prefix_spill,
        spill_limit=spill_limit,
    )
    with status(f"loading {model}"):
        llm = LLM(model, row_budget=row_budget, **engine)
        llm.methods.find(decoder or llm.default_decoder)
        for entry in adapter or ():
            called, equals, folder = entry.partition("=")
            if not equals:
                raise InvalidRequestError(f"--adapter wants NAME=FOLDER, not {entry!r}")
            llm.add_adapter(called, folder)
    run(llm, settings)

"""`anydecode serve`: an HTTP server with the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from anydecode.cli import options
from anydecode.errors import InvalidRequestError


def served_name(model: str) -> str:
    """The model's name for clients: only the last part of a path."""
    path = Path(model)
    return path.stem if path.is_file() else path.name if path.is_dir() else model


def named_model(entry: str) -> tuple[str, str]:
    """The name for clients and the model of `NAME=MODEL`, or of a model without a name."""
    name, equals, model = entry.partition("=")
    if name and equals and model and not Path(entry).exists():
        return name, model
    return served_name(entry), entry


def check_address(host: str, port: int) -> None:
    """Check, before a model is loaded, that the server can listen on an address; 0 is a free port.

    Raises:
        InvalidRequestError: It cannot, such as where another program does.
    """
    try:
        socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose with --host and"
            " --port"
        ) from None


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=(
                "Model name, Hugging Face repo id, folder or .gguf file; NAME=MODEL names it. The"
                " first is loaded now and answers requests that name none; each other one when a"
                " request names it. Default: that of ANYDECODE_MODEL, or"
                f" {options.DEFAULT_MODEL}."
            ),
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0: a free one."),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the first model for clients. Default: MODEL, without its folder.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="SIZE",
            help=(
                "Maximum memory of the loaded models, their files and caches, such as 12GiB. The"
                " least recently used models are unloaded for another one. Default: no limit."
            ),
        ),
    ] = None,
    idle_unload: Annotated[
        float | None,
        typer.Option(
            "--idle-unload",
            metavar="SECONDS",
            min=1,
            help="Unload a model that was not used for so long; the next request for it loads it"
            " again. Default: never.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help=(
                "Require this API key; repeatable, or separated by commas. Each key has its own"
                " prefix cache. Default: those of ANYDECODE_API_KEYS, or no key."
            ),
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Require no key, although other machines can connect."),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", help="Accept this Host header too; repeatable; *: any. Default: none."
        ),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Serve /metrics and /live without a key.")
    ] = False,
    decoder: options.Decoder = None,
    allow_decoder: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-decoder",
            metavar="KEY:NAME=VALUE",
            help=(
                "Decoder that requests may select although a parameter is beyond its bounds for"
                " requests; repeatable. Default: none."
            ),
        ),
    ] = None,
    allow_logits_processor: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-logits-processor",
            metavar="KEY[:NAME=VALUE]",
            help=(
                "Sampler of `anydecode methods`, such as one of your own, that requests may name in"
                " logits_processors; repeatable. Default: none."
            ),
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help=(
                "Scheduler key of `anydecode"
                " methods` (family serving)."
                " Default: decodes before"
                " prefills."
            ),
        ),
    ] = None,
    drafting: Annotated[
        str | None,
        typer.Option(
            "--drafting",
            help="How much all requests together draft. Default: smartspec-server, what saves time;"
            " fixed: what their methods say.",
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            help="Draft model; may be repeated. Default: the one that comes with anydecode, if"
            " there is one for the model; none: no draft model.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=FOLDER",
            help="LoRA adapter to serve as model NAME; repeatable. Default: none.",
        ),
    ] = None,
    adapter_folder: Annotated[
        Path | None,
        typer.Option(
            "--adapter-folder",
            exists=True,
            file_okay=False,
            help="Folder whose LoRA adapters requests may load and unload. Default: none.",
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Maximum number of concurrent requests.")
    ] = 256,
    max_prompt: Annotated[
        int,
        typer.Option(
            "--max-prompt", min=0, help="Maximum prompt length in tokens; 0: the model's limit."
        ),
    ] = 0,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1024, help="Maximum size of a request body in bytes.")
    ] = 4 << 20,
    prepare_seconds: Annotated[
        float,
        typer.Option(
            "--prepare-seconds",
            min=0.01,
            help="Maximum processor time to compile a constraint, render a conversation or tokenise"
            " a prompt.",
        ),
    ] = 2.0,
    prepare_memory: Annotated[
        str,
        typer.Option("--prepare-memory", help="Maximum memory of the same, such as 512MiB or 4g."),
    ] = "1GiB",
    store: Annotated[
        str,
        typer.Option(
            "--store",
            metavar="PATH|memory|none",
            help="Where the responses of /v1/responses are stored, with their texts, and files and"
            " batches: a file that outlasts the server, its memory, or nowhere.",
        ),
    ] = "memory",
    store_limit: Annotated[
        str,
        typer.Option(
            "--store-limit", help="Maximum size of the stored responses, such as 512MiB or 4g."
        ),
    ] = "64MiB",
    store_days: Annotated[
        float,
        typer.Option(
            "--store-days", min=0, help="Days after which stored responses and files are removed."
        ),
    ] = 30.0,
    max_background: Annotated[
        int,
        typer.Option(
            "--max-background",
            min=1,
            help="Maximum number of responses that are generated in the background at once.",
        ),
    ] = 64,
    max_file: Annotated[
        str, typer.Option("--max-file", help="Maximum size of an uploaded file, such as 32MiB.")
    ] = "32MiB",
    files_limit: Annotated[
        str,
        typer.Option(
            "--files-limit", help="Maximum size of all files of batches, such as 512MiB or 4g."
        ),
    ] = "256MiB",
    max_logprobs: Annotated[
        int,
        typer.Option(
            "--max-logprobs",
            min=1,
            help="Maximum number of log-probabilities that the running requests of a model may"
            " record: tokens of all samples, each with its alternatives.",
        ),
    ] = 1 << 21,
    max_batches: Annotated[
        int,
        typer.Option(
            "--max-batches",
            min=1,
            help="Maximum number of batches of one API key that have not ended.",
        ),
    ] = 16,
    batch_lines: Annotated[
        int,
        typer.Option(
            "--batch-lines", min=1, help="Maximum number of requests of batches that run at once."
        ),
    ] = 4,
    drain: Annotated[
        float,
        typer.Option("--drain", min=0, help="Seconds that a shutdown waits for running answers."),
    ] = 10.0,
    cache_positions: Annotated[
        int | None,
        typer.Option(
            "--cache-positions",
            min=1,
            help="Size of the key-value cache in positions. Default: chosen for the model.",
        ),
    ] = None,
    cache_memory: Annotated[
        str | None,
        typer.Option(
            "--cache-memory",
            metavar="SIZE",
            help=(
                "Maximum size of a model's key-value cache, such as 2GiB. Default: with a memory"
                " budget, half of it divided by the number of models; else a quarter of the"
                " machine's memory."
            ),
        ),
    ] = None,
    prefix_spill: Annotated[
        str | None,
        typer.Option(
            "--prefix-spill",
            metavar="DIR",
            help="Store evicted prefixes in this folder, or in 'memory'. Default: not stored.",
        ),
    ] = None,
    spill_limit: Annotated[
        str,
        typer.Option(
            "--spill-limit", help="Maximum size of the stored prefixes, such as 512MiB or 4g."
        ),
    ] = "4GiB",
    row_budget: Annotated[
        int, typer.Option("--row-budget", min=1, help="Maximum number of rows per pass.")
    ] = 512,
    tool_parser: Annotated[
        str,
        typer.Option(
            "--tool-parser",
            help=(
                "Format of tool calls: auto, none, hermes, mistral, mistral-args, llama3, llama4,"
                " llama4-json, qwen3-coder, deepseek-v3, deepseek-v3.1, glm, glm-4.7, kimi,"
                " deepseek-v3.2, deepseek-v4, minimax-m2, command, command-r, apriel, apertus,"
                " gigachat, gigachat-3.5, solar, functionary-v3.1, functionary-v3.2, gpt-oss,"
                " granite, phi, phi-functools, functiongemma, gemma4, lfm2, nemotron or seed."
            ),
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            "--reasoning-parser",
            help=(
                "Format of reasoning: auto, think, seed, mistral, gemma4, command, apriel, apertus,"
                " solar or none."
            ),
        ),
    ] = "auto",
    generation_config: options.GenerationConfig = "auto",
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    family: options.Family = None,
    mask: options.Mask = None,
    block: options.Block = None,
    split: options.Split = None,
) -> None:
    """Serve models with the APIs of OpenAI, Anthropic and Ollama, and a page at / to try them.

    --decoder, --draft, --adapter, --family, --mask, --block, --split and the PATH of
    --generation-config are of the first model.

    Example: anydecode serve smollm2-135m-instruct --port 8000
    """
    from anydecode import catalogue
    from anydecode.api.llm import LLM
    from anydecode.api.prefix_spill import parse_bytes
    from anydecode.decoders.decoder import Decoder
    from anydecode.models.loading.names import resolve
    from anydecode.progress import status
    from anydecode.sampling.preset import SamplerPreset
    from anydecode.server.models import ServedModel, ServedModels, files_bytes
    from anydecode.server.running import serve as run
    from anydecode.server.settings import Settings, api_keys

    keys = api_keys(api_key, os.environ.get("ANYDECODE_API_KEYS"), host, no_auth)
    check_address(host, port)
    options.check_methods([decoder, *(allow_decoder or ())])
    entries = [
        named_model(entry)
        for entry in models or [os.environ.get("ANYDECODE_MODEL") or options.DEFAULT_MODEL]
    ]
    (first_name, first), *others = entries
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    cache_bytes = None if cache_memory is None else parse_bytes(cache_memory)
    if budget is not None and cache_bytes is None:
        cache_bytes = budget // (2 * len(entries))
    settings = Settings(
        name=name or first_name,
        host=host,
        port=port,
        api_keys=keys,
        max_body=max_body,
        max_prompt=max_prompt,
        max_requests=max_requests,
        drain_seconds=drain,
        store=store,
        store_bytes=parse_bytes(store_limit),
        store_seconds=86400 * store_days,
        max_background=max_background,
        max_file=parse_bytes(max_file),
        file_bytes=parse_bytes(files_limit),
        max_logprobs=max_logprobs,
        max_batches=max_batches,
        batch_lines=batch_lines,
        prepare_seconds=prepare_seconds,
        prepare_memory=parse_bytes(prepare_memory),
        decoder=decoder,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        allowed_decoders=tuple(allow_decoder or ()),
        allowed_logits_processors=tuple(allow_logits_processor or ()),
        allowed_hosts=tuple(name.lower() for name in allow_host or ()),
        open_metrics=open_metrics,
        adapter_folder=adapter_folder,
    )
    engine = options.without_none(
        dtype=dtype,
        cache=cache,
        threads=threads,
        backend=backend,
        schedule=schedule,
        drafting=drafting,
        cache_positions=cache_positions,
        cache_memory=cache_bytes,
        row_budget=row_budget,
    )
    for_others = "none" if generation_config == "none" else "auto"
    own = options.without_none(
        generation_config=generation_config,
        draft=draft,
        family=family,
        mask=mask,
        block=block,
        split=split,
        prefix_spill=prefix_spill,
        spill_limit=spill_limit,
    )

    def served(name: str, model: str) -> ServedModel:
        path = resolve(model)
        num_bytes = files_bytes(path)
        if cache_bytes is not None and cache_positions is None:
            num_bytes += cache_bytes
        return ServedModel(name, lambda: opened(model), num_bytes, path)

    def opened(model: str, **more: Any) -> LLM:
        llm = LLM(model, **{"generation_config": for_others, **engine, **more})
        llm.finds_draft = False  # no request opens a model
        return llm

    def load_first() -> LLM:
        llm = opened(first, **own)
        for choice in (decoder or llm.default_decoder, *settings.allowed_decoders):
            method = llm.methods.find(choice)
            if isinstance(method, Decoder) and method.requirements.finds_draft:
                llm.open_own_draft()
        return llm

    with status(f"loading {first}"):
        further = [served(*entry) for entry in others]
        llm = load_first()
        for choice in settings.allowed_logits_processors:
            catalogue.build_as(choice, "a sampler", SamplerPreset)
        for entry in adapter or ():
            adapter_name, equals, folder = entry.partition("=")
            if not equals:
                raise InvalidRequestError(f"--adapter {entry!r} must have the form NAME=FOLDER")
            llm.add_adapter(adapter_name, folder)
    options.note_draft(llm, decoder, draft)
    can_unload = bool(others) or idle_unload is not None
    run(
        ServedModels(
            llm,
            settings,
            further,
            reload=load_first if can_unload else None,
            memory_budget=budget,
            idle_seconds=idle_unload,
        )
    )

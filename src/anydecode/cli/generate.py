"""`anydecode generate`: continue a text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.cli import options
from anydecode.cli.output import counted, print_json, write_now
from anydecode.errors import InvalidRequestError
from anydecode.progress import note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anydecode.api.generation import Generation, StreamChunk
    from anydecode.api.llm import LLM
    from anydecode.constraints.constraint import Constraint

HINT_MARKER = ".chat-hint-given"


def generate(
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt.")] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The same as PROMPT; - reads standard input."),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    decoder: options.Decoder = None,
    sampler: options.Sampler = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    generation_config: options.LocalGenerationConfig = "none",
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            help="Number of answers; with beam, the best ones of one search.",
        ),
    ] = 1,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    family: options.Family = None,
    mask: options.Mask = None,
    block: options.Block = None,
    split: options.Split = None,
    draft: options.Drafts = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", metavar="FILE", help="Constrain the answer to this JSON schema."),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            "--grammar",
            metavar="FILE",
            help="Constrain the answer to this Lark grammar (a .gbnf file: GBNF grammar).",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option("--regex", help="Constrain the answer to this regular expression."),
    ] = None,
    constraint: Annotated[
        str | None,
        typer.Option(
            "--constraint", help="Constraint key of `anydecode methods`, such as monitors."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write a trace of all passes to this HTML file."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Continue a text.

    Example: anydecode generate --prompt "Once upon a time" --temperature 0.8 --seed 7
    """
    prompt = options.read_text(prompt if prompt is not None else text, "prompt")
    constraint_options = {
        "--schema": schema,
        "--grammar": grammar,
        "--regex": regex,
        "--constraint": constraint,
    }
    used = [option for option, value in constraint_options.items() if value is not None]
    if len(used) > 1:
        raise InvalidRequestError(f"{used[0]} and {used[1]} are both constraints: give only one")
    request_constraint: Any = constraint
    if schema is not None:
        request_constraint = read_schema(schema)
    elif grammar is not None:
        request_constraint = read_grammar(grammar)
    elif regex is not None:
        from anydecode.constraints.languages import Regex

        request_constraint = Regex(regex)
    options.check_methods([decoder], sampler or ())
    llm = options.load(
        model, dtype, threads, backend, draft, cache, family, mask, block, split, generation_config
    )
    options.note_draft(llm, decoder, draft)
    settings = options.without_none(
        decoder=decoder,
        sampler=sampler or None,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos or None,
        trace=trace is not None or None,
        constraint=request_constraint,
    )
    if samples > 1:
        generation = llm.generate(prompt, n=samples, **settings)
        if json:
            answers = [sample.to_dict() for sample in generation.samples]
            print_json({"model": model, "samples": answers})
        else:
            print_samples(generation)
    elif json:
        generation = llm.generate(prompt, **settings)
        print_json(describe(generation, model))
    else:
        chunks = llm.stream(prompt, **settings)
        hint_at_chat(llm, model)
        generation = stream(chunks)
    if trace is not None:
        write_trace(generation, trace)


def read_schema(file: Path) -> Constraint:
    """Read a JSON schema constraint from a file. Raises `InvalidRequestError` if that fails."""
    from anydecode.constraints.json.json_schema import JsonSchema

    try:
        return JsonSchema(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"cannot read the schema {file}: {options.os_reason(error)}"
        ) from None


def read_grammar(file: Path) -> Constraint:
    """Read a grammar constraint from a file. Raises `InvalidRequestError` if that fails."""
    from anydecode.constraints.languages import Grammar

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"cannot read the grammar {file}: {options.os_reason(error)}"
        ) from None
    return Grammar(text, syntax="gbnf" if file.suffix == ".gbnf" else "lark")


def write_trace(generation: Generation, file: Path) -> None:
    """Write the generation's passes to an HTML file."""
    from anydecode.trace.html import page

    try:
        file.write_text(page(generation), encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(
            f"cannot write the trace {file}: {options.os_reason(error)}"
        ) from None


def stream(chunks: Iterable[StreamChunk]) -> Generation:
    """Write chunks to stdout as they arrive, then a summary to stderr; returns the Generation."""
    generation = None
    for chunk in chunks:
        write_now(chunk.text)
        generation = chunk.generation
    write_now("\n")
    if generation is None:
        raise RuntimeError("the stream ended without its generation")
    note(summary(generation))
    return generation


def print_samples(generation: Generation) -> None:
    """Write each sample to stdout and its summary to stderr."""
    for number, sample in enumerate(generation.samples):
        write_now(sample.text + "\n")
        score = "" if sample.score is None else f", score {sample.score:.4f}"
        note(summary(sample, is_first=number == 0) + score)


def summary(generation: Generation, is_first: bool = True) -> str:
    """The summary line of a generation; its speed is computed from the tokens and seconds as
    printed:

    `128 tokens in 0.841 s: 152.2 tokens/s (prompt included; first token after 0.020 s), 40 passes,
    length`

    Args:
        generation: The generation.
        is_first: Whether it is the first sample, with which the passes of a search count.
    """
    stats = generation.stats
    passes = counted(stats.passes, "pass", "passes")
    if not is_first and not stats.passes:
        passes = "no further passes"
    seconds = max(round(stats.seconds, 3), 0.001)
    return (
        f"{counted(stats.num_tokens, 'token', 'tokens')} in {seconds:.3f} s:"
        f" {stats.num_tokens / seconds:.1f} tokens/s (prompt included; first token after"
        f" {stats.time_to_first_token:.3f} s), {passes}, {generation.finish_reason}"
    )


def describe(generation: Generation, model: str) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"model": model, **generation.to_dict()}


def hint_at_chat(llm: LLM, model: str) -> None:
    """Suggest `chat` if the model is instruction-tuned; once per cache folder."""
    from anydecode.folders import default_cache

    if llm.tokenizer.chat_template is None:
        return
    marker = default_cache() / HINT_MARKER
    if os.path.exists(marker):
        return
    note(f"{model} is a chat model: use `anydecode chat` to chat with it. (Shown once.)")
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        return

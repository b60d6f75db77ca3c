"""`anydecode chat`: chat with a model, in one turn or many."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.cli import options
from anydecode.cli.generate import describe, stream
from anydecode.cli.output import print_json
from anydecode.progress import note

if TYPE_CHECKING:
    from anydecode.api.llm import LLM

COMMANDS = (
    "/system TEXT sets the system message, /retry regenerates the answer, /clear starts over,"
    " /quit ends."
)
Messages = list[dict[str, Any]]


def chat(
    text: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Message to answer. Default: start a conversation."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The same as PROMPT; - reads standard input."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message. Default: none.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    decoder: options.Decoder = None,
    sampler: options.Sampler = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    generation_config: options.LocalGenerationConfig = "none",
    seed: options.Seed = None,
    stop: options.Stop = None,
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    family: options.Family = None,
    mask: options.Mask = None,
    block: options.Block = None,
    draft: options.Drafts = None,
    json: options.Json = False,
) -> None:
    """Chat with a model; /help lists the commands of a conversation.

    Example: anydecode chat --prompt "Why is the sky blue?"
    """
    message = prompt if prompt is not None else text
    if message is None and json:
        message = "-"
    if message is not None:
        message = options.read_text(message, "prompt")
    options.check_methods([decoder], sampler or ())
    own = model, dtype, threads, backend, draft, cache, family, mask, block
    llm = options.load(*own, None, generation_config)
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
    )
    messages: Messages = [{"role": "system", "content": system}] if system else []
    if message is None:
        converse(llm, messages, settings)
        return
    messages.append({"role": "user", "content": message})
    if json:
        print_json(describe(llm.chat(messages, **settings), model))
    else:
        answer(llm, messages, settings)


def answer(llm: LLM, messages: Messages, settings: dict[str, Any]) -> str:
    """Stream the answer to the last message; returns its text."""
    return stream(llm.stream_chat(messages, **settings)).text


def converse(llm: LLM, messages: Messages, settings: dict[str, Any]) -> None:
    """Read and answer messages until the end of input or /quit. Ctrl-C ends an answer, not the
    conversation."""
    if sys.stdin.isatty():
        note(f"Type a message. {COMMANDS}")
    while (line := read_line()) is not None:
        if line.startswith("/"):
            if not run_command(line, messages):
                return
            if line != "/retry" or not messages or messages[-1]["role"] != "user":
                continue
        elif line.strip():
            messages.append({"role": "user", "content": line})
        else:
            continue
        try:
            text = answer(llm, messages, settings)
        except KeyboardInterrupt:
            note("\n(interrupted)")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def read_line() -> str | None:
    """The next line of input; None at the end."""
    try:
        return options.utf8(partial(input, "> " if sys.stdin.isatty() else ""), "message")
    except EOFError:
        return None


def run_command(line: str, messages: Messages) -> bool:
    """Apply a /command to `messages`; False for /quit."""
    command, _, rest = line.partition(" ")
    first_is_system = bool(messages) and messages[0]["role"] == "system"
    if command == "/quit":
        return False
    if command == "/clear":
        del messages[int(first_is_system) :]
    elif command == "/system":
        messages[: int(first_is_system)] = [{"role": "system", "content": rest}] if rest else []
    elif command == "/retry":
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
    else:
        note(COMMANDS)
    return True

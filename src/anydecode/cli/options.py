"""Options shared by several commands, and their conversion to arguments of the Python API."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.progress import note

if TYPE_CHECKING:
    from anydecode.api.llm import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="ANYDECODE_MODEL",
        help="Model name, Hugging Face repo id, folder or .gguf file.",
    ),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        "--decoder",
        "-d",
        help=(
            "Decoder key of `anydecode methods`, with options as key:name=value,..."
            " Default: auto, or the method a diffusion model was trained for."
        ),
    ),
]
Sampler = Annotated[
    list[str] | None,
    typer.Option(
        "--sampler",
        help=(
            "Sampling key of `anydecode methods`, such as"
            " mirostat:tau=4; repeatable. Default: none."
        ),
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        help="Sampling temperature; 0 is greedy. Default: 0, unless a sampler sets it.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample from the k most probable tokens. Default: all."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the smallest set of tokens with probability p. Default: all."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Sample from tokens at least p times as probable as the top one. Default: all.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Random seed; the same seed gives the same text. Default: a new one."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the answer before this text; repeatable. Default: none."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Weight format: float32, bfloat16, int8 or int4. Default: as stored."
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        help="Run parts of the model in other processes: step-3 (attention and FFNs apart).",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help=(
            "Format of the key-value cache: float32, float16,"
            " bfloat16, int8 or int4. Default: the backend's."
        ),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Number of CPU threads. Default: chosen for the machine."),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Kernel backend, or transformers for a model that only that package implements."
        " Default: the fastest available.",
    ),
]
Family = Annotated[
    str | None,
    typer.Option(
        "--family", help="Family of the model, where its config does not say it (open_dllm)."
    ),
]
Mask = Annotated[
    int | None,
    typer.Option("--mask", min=0, help="Mask token of the model. Default: its tokenizer's."),
]
Block = Annotated[
    int | None,
    typer.Option(
        "--block", min=1, help="Block size of a block-diffusion model. Default: the model's."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Draft model for methods that need one, or the folder of a drafter (EAGLE, DFlash,"
        " Medusa, Hydra); self:int4 quantises the model itself; none: not even the one that comes"
        " with anydecode. Default: that one, if there is one for the model.",
    ),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="Draft model for methods that need one, or the folder of a drafter (EAGLE, DFlash,"
        " Medusa, Hydra); self:int4 quantises the model itself; none: not even the one that comes"
        " with anydecode. Default: that one, if there is one for the model. May be repeated, for"
        " methods that draft with several (taps).",
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        metavar="auto|none|PATH",
        help="Sampling options of requests that set none: temperature, top-k, top-p, min-p and"
        " repetition penalty. auto: those of the model's generation_config.json or GGUF file; PATH:"
        " those of another generation_config.json or of its folder; none: temperature 1.",
    ),
]
LocalGenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        metavar="auto|none|PATH",
        help="Sampling options that are not given: auto: those of the model's"
        " generation_config.json or GGUF file; PATH: those of another generation_config.json or of"
        " its folder; none: greedy decoding.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, on one line.")]


def without_none(**values: Any) -> dict[str, Any]:
    """The arguments that are not None, so that the Python API's defaults apply to the others."""
    return {name: value for name, value in values.items() if value is not None}


def load(
    model: str,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    draft: str | list[str] | None = None,
    cache: str | None = None,
    family: str | None = None,
    mask: int | None = None,
    block: int | None = None,
    split: str | None = None,
    generation_config: str | None = None,
) -> LLM:
    """Load the model, with a status line on stderr."""
    from anydecode.api.llm import LLM
    from anydecode.progress import status

    with status(f"loading {model}"):
        arguments = without_none(
            dtype=dtype,
            threads=threads,
            backend=backend,
            draft=draft,
            cache=cache,
            family=family,
            mask=mask,
            block=block,
            split=split,
            generation_config=generation_config,
        )
        return LLM(model, **arguments)


def check_methods(decoders: Iterable[str | None], samplers: Iterable[str] = ()) -> None:
    """Check the methods that options name before a model is loaded, which may take long.

    Raises:
        InvalidRequestError: There is none of such a name, or a parameter is wrong.
    """
    from anydecode.api.methods import build_as, build_decoder
    from anydecode.sampling.preset import SamplerPreset

    for decoder in decoders:
        if decoder is not None:
            build_decoder(decoder)
    for sampler in samplers:
        build_as(sampler, SamplerPreset)


def os_reason(error: OSError | UnicodeError) -> str:
    """Why a file cannot be read or written, without the number of the error."""
    return getattr(error, "strerror", None) or str(error)


def note_draft(llm: LLM, decoder: str | None, draft: str | list[str] | None) -> None:
    """Say on stderr that the method does not run the draft model of `--draft`, which it would run
    if it were another one, or never does; or, without `--draft`, that a method which needs a draft
    model runs the one that comes with anydecode. Without a decoder it is the model's default one.

    Raises:
        InvalidRequestError: There is no such decoder.
    """
    from anydecode.decoders.decoder import Decoder

    given = [draft] if isinstance(draft, str) else draft or []
    choice = decoder or llm.default_decoder
    method = llm.methods.find(choice)
    needs = method.requirements if isinstance(method, Decoder) else Decoder.requirements
    if not given and llm.has_shipped_draft and (needs.runners or needs.every_draft):
        with suppress(UnsupportedCombinationError):  # the request says what does not fit
            llm.resources.check_decoder(choice, needs)
            note(
                f"decoder {choice!r} drafts with the EAGLE-3 drafter that comes with anydecode:"
                " --draft gives another one"
            )
    if not set(given) - {"none"}:
        return
    if "draft" in needs.optional_runners and not llm.resources.optional_runners(needs):
        note(
            f"the draft model does not fit and is not used by decoder {choice!r}: it needs a"
            " causal one with the model's vocabulary, or a drafter of one token per pass"
        )
    elif not (needs.optional_runners or needs.runners or needs.every_draft):
        note(f"decoder {choice!r} uses no draft model: --draft changes nothing")


def utf8(read: Callable[[], str], what: str) -> str:
    """The text that `read` returns, of an argument or an input. Where the locale has another
    encoding, such as that of LC_ALL=C, Python has escaped its bytes.

    Raises:
        InvalidRequestError: It is not UTF-8.
    """
    try:
        text = read()
        if any("\ud800" <= character <= "\udfff" for character in text):
            text = os.fsencode(text).decode()
    except UnicodeError:
        raise InvalidRequestError(f"the {what} is not UTF-8 text") from None
    return text


def read_text(value: str | None, what: str) -> str:
    """Return `value`, or standard input for `-`. Raises `InvalidRequestError` if it is empty, or no
    UTF-8."""
    if value == "-":
        value = utf8(sys.stdin.read, what)
    elif value:
        value = utf8(partial(str, value), what)
    if not value:
        raise InvalidRequestError(
            f"no {what}: give one with --{what}, or --{what} - for standard input"
        )
    return value

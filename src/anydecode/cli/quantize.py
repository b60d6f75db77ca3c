"""`anydecode quantize`: write a model in another weight format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.errors import InvalidRequestError
from anydecode.machine import usable_cores
from anydecode.progress import note, progress

_PROMPT = "The capital of France is"
_CHECK_TOKENS = 16


def quantize(
    model: Annotated[str, typer.Argument(help="Name or path of a model in a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The new GGUF file.")],
    format: Annotated[
        str,
        typer.Option(
            "--format", help="Format of the weights, such as q8_0, q6_k, q4_k, iq4_nl or mxfp4."
        ),
    ] = "q4_k",
    prompt: Annotated[
        str,
        typer.Option("--prompt", help="A text that the new model continues; empty: no check."),
    ] = _PROMPT,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Write the weights of a GGUF file in another format, open the new file and generate a text.

    Example: anydecode quantize smollm2-135m-instruct small.gguf --format q4_k
    """
    from anydecode.api.llm import LLM
    from anydecode.models.loading import load_checkpoint
    from anydecode.quantization.gguf import quantize_file

    source = load_checkpoint(model).path
    if not source.is_file():
        raise InvalidRequestError(
            f"{source}: is a folder; `quantize` reads GGUF files, which convert_hf_to_gguf.py of"
            " llama.cpp writes"
        )
    with progress("the new file", unit="bytes") as bar:
        summary = quantize_file(
            source,
            out,
            format,
            overwrite=force,
            threads=threads or usable_cores(),
            progress=lambda done, total, name: bar.update(done, total, detail=name),
        )
    text = None
    if prompt:
        with LLM(str(out), **options.without_none(threads=threads)) as llm:
            text = llm.generate(prompt, max_tokens=_CHECK_TOKENS).text
    else:
        load_checkpoint(out)
    if json:
        print_json({**asdict(summary), "prompt": prompt or None, "text": text})
        return
    formats = ", ".join(f"{count} in {name}" for name, count in sorted(summary.formats.items()))
    note(f"{summary.num_bytes / 1e6:.1f} MB of {summary.source_bytes / 1e6:.1f} MB; {formats}")
    note(f"{summary.bits_per_weight:.2f} bits per weight, relative error {summary.error:.4f}")
    if text is not None:
        note(f"{prompt}{text}")
    print(out)

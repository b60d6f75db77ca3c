"""`anydecode quantize`: write a model in another weight format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.errors import InvalidRequestError
from anydecode.machine import usable_cores
from anydecode.progress import note, progress

if TYPE_CHECKING:
    from anydecode.models.checkpoint import Checkpoint
    from anydecode.models.loading.gguf_file import GGUFFile

_PROMPT = "The capital of France is"
_CHECK_TOKENS = 16


def quantize(
    model: Annotated[
        str, typer.Argument(help="Name or path of a model: a GGUF file, or a folder.")
    ],
    out: Annotated[Path, typer.Argument(help="The new GGUF file.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the weights: f32, f16, bf16, q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1,"
            " q4_0, q3_k, q2_k, iq4_nl, iq4_xs, iq3_s, iq3_xxs, iq2_s, iq2_xs, iq2_xxs, iq1_m,"
            " iq1_s, mxfp4, nvfp4, tq2_0, tq1_0, ptq161, or a mixture: q5_k_m, q5_k_s, q4_k_m,"
            " q4_k_s, q3_k_l, q3_k_m, q3_k_s.",
        ),
    ] = "q4_k",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="Texts, separated by empty lines, for ptq161 (default: the package's prompts) or"
            " for an importance matrix.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", help="Importance matrix to read, of llama-imatrix or of this."),
    ] = None,
    save_imatrix: Annotated[
        Path | None,
        typer.Option(
            "--save-imatrix",
            help="Write the importance matrix of --calibrate here: in GGUF, or in llama-imatrix's"
            " older format if the name ends with .dat.",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=0, help="Passes of ptq161 over all texts; default: 20."),
    ] = None,
    restore: Annotated[
        int | None,
        typer.Option(
            "--restore",
            min=0,
            help="Steps of ptq161's low-rank update between two quantisations; default: 0, which is"
            " one quantisation.",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt",
            help="A text that the new model continues, or represents if it is an encoder; empty: no"
            " check.",
        ),
    ] = _PROMPT,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Write a GGUF file, or a folder of safetensors, as a GGUF file in another format, open it and
    generate a text, or the embedding of one.

    Example: anydecode quantize smollm2-135m-instruct small.gguf --format q4_k
    """
    from anydecode.api.llm import LLM
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.loading.gguf_file import GGUFFile
    from anydecode.quantization import encoders, ptq161
    from anydecode.quantization.gguf import quantize_file, reads_importance
    from anydecode.quantization.gguf_folder import FolderFile

    checkpoint = load_checkpoint(model)
    source = checkpoint.path
    is_folder = not source.is_file()
    is_calibrated = format.lower() == ptq161.KEY
    training = options.without_none(epochs=epochs, restore=restore)
    if not is_calibrated and training:
        raise InvalidRequestError(f"--epochs and --restore are options of {ptq161.KEY} alone")
    if imatrix is not None and calibrate is not None:
        raise InvalidRequestError("--imatrix and --calibrate exclude each other: give one of them")
    if save_imatrix is not None and (is_calibrated or calibrate is None):
        raise InvalidRequestError("--save-imatrix writes what --calibrate measures: give both")
    is_weighed = imatrix is not None or (calibrate is not None and not is_calibrated)
    if is_weighed and (is_calibrated or not reads_importance(format)):
        names = ", ".join(name.lower() for name in encoders.WEIGHED)
        raise InvalidRequestError(
            f"an importance matrix changes nothing in {format.lower()}; it does in {names} and"
            " mixtures of them"
        )
    file = FolderFile(checkpoint) if is_folder else GGUFFile(source)
    opened = file.opened if isinstance(file, FolderFile) else checkpoint
    importance: dict[str, Any] = {}
    if is_weighed:
        importance = _importance(opened, file, imatrix, calibrate, save_imatrix)
    with progress("the new file", unit="count" if is_calibrated else "bytes") as bar:
        common: dict[str, Any] = {
            "overwrite": force,
            "threads": threads or usable_cores(),
            "progress": lambda done, total, name: bar.update(done, total, detail=name),
        }
        if is_calibrated:
            texts = ptq161.calibration_texts(calibrate)
            summary = ptq161.quantize_gguf(file, out, texts, **training, **common)
        else:
            common |= {"importance": importance, "keep_packed": is_folder}
            summary = quantize_file(file, out, format, **common)
        if isinstance(file, FolderFile) and file.method is not None:
            note(_requantised(file.method, file.packed, summary.formats))
    text = None
    if prompt:
        with LLM(str(out), **options.without_none(threads=threads)) as llm:
            if llm.model.spec.is_encoder:
                num_values = len(llm.embed(prompt))
                note(f"{prompt!r} is represented by {num_values} numbers")
            else:
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


def _requantised(method: str, packed: dict[str, int], written: dict[str, int]) -> str:
    """What became of the weights of a quantised repository."""
    kept = [name for name, count in sorted(packed.items()) if written.get(name, 0) >= count]
    what = f"stay in {', '.join(kept)}"
    if not kept or len(kept) < len(packed):
        rest = f", but for those that {what}" if kept else ""
        what = f"were written again from their values{rest}"
    return f"the repository is quantised ({method}): its weights {what}"


def _importance(
    checkpoint: Checkpoint,
    file: GGUFFile,
    imatrix: Path | None,
    calibrate: Path | None,
    save: Path | None,
) -> dict[str, Any]:
    """The importance of the inputs of a model's matrices, read or measured."""
    from anydecode.quantization.importance import measure_importance, read_importance
    from anydecode.quantization.ptq161 import calibration_texts

    if imatrix is not None:
        return read_importance(imatrix.expanduser()).importance()
    assert calibrate is not None, "one of the two is given"
    note("measuring the importance of inputs")
    texts = calibration_texts(calibrate)
    measured = measure_importance(checkpoint, file, texts, calibrate.name)
    if save is not None:
        measured.write(save)
    return measured.importance()

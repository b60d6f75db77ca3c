"""`anydecode export-drafter`: write a drafter as a GGUF file for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.errors import InvalidRequestError
from anydecode.progress import note


def export_drafter(
    model: Annotated[str, typer.Argument(help="Name or path of the target, in a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The new GGUF file.")],
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft", help="Folder of an EAGLE-3 drafter; default: that of this package."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: options.Json = False,
) -> None:
    """Write an EAGLE-3 drafter as a GGUF file in F16, which llama.cpp's server opens beside its
    target (`--spec-type draft-eagle3 --spec-draft-model FILE`), and anydecode with --draft.

    Example: anydecode export-drafter smollm2-135m-instruct drafter.gguf
    """
    from anydecode.models.families import load_network
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.shipped_drafters import shipped_drafter
    from anydecode.quantization import gguf_drafter

    target = load_checkpoint(model)
    folder = draft or shipped_drafter(load_network(target))
    if folder is None:
        raise InvalidRequestError(f"this package has no drafter for {target.name}; give --draft")
    size = gguf_drafter.export_drafter(load_checkpoint(folder), target.path, out, overwrite=force)
    if json:
        print_json({"path": str(out), "num_bytes": size})
        return
    note(f"{size / 1e6:.1f} MB")
    print(out)

"""`anydecode pull`: download a model into the cache folder."""

from __future__ import annotations

from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.progress import progress


def pull_model(
    name: Annotated[str, typer.Argument(help="Model name or Hugging Face repo id.")] = (
        options.DEFAULT_MODEL
    ),
    json: options.Json = False,
) -> None:
    """Download a model into the cache folder, unless it is there; prints its path.

    Example: anydecode pull smollm2-135m-instruct
    """
    from anydecode.models.loading import pull

    with progress(name, unit="bytes") as bar:
        path = pull(name, progress=bar.update)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)

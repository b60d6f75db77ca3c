"""The command that trains a small model whose feed-forward blocks are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.train.app import (
    Minutes,
    Out,
    Rate,
    Seed,
    Steps,
    Threads,
    app,
    minutes_or_default,
    report,
    trained,
)
from anydecode.report import PlotFile

if TYPE_CHECKING:
    pass


@app.command("blocks")
def train_blocks(
    out: Out = Path("trained-blocks"),
    minutes: Minutes = None,
    steps: Steps = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 32,
    rate: Rate = 2e-3,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Tokens that shall use the same blocks.")
    ] = 8,
    chunk_weight: Annotated[
        float, typer.Option("--chunk-weight", min=0, help="Factor of the chunk loss.")
    ] = 1.0,
    locality_weight: Annotated[
        float, typer.Option("--locality-weight", min=0, help="Factor of the locality loss.")
    ] = 0.05,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a small BlockFFN model, from random weights, on the tasks, so that chunks of tokens use
    few blocks. A run with the same --out is resumed. The model is in the folder "model" of --out.

    Example: anydecode train blocks --minutes 60 --out my-blocks --plot curve.svg
    """
    from anydecode.training import curve
    from anydecode.training.blockffn import BlockRecipe, BlockRun

    minutes = minutes_or_default(minutes, steps)
    recipe = BlockRecipe(
        minutes,
        steps,
        batch=batch,
        rate=rate,
        chunk=chunk,
        chunk_weight=chunk_weight,
        locality_weight=locality_weight,
        seed=seed,
    )
    run = trained(lambda: BlockRun(out, recipe), "blocks", threads)
    first, *_, last = run.unused()
    lines = []
    for size, share in last.items():
        tokens = "a token leaves" if size == 1 else f"{size} tokens leave"
        lines.append(f"blocks that {tokens} unused: {first[size]:.3f} -> {share:.3f}")
    report(
        run,
        run.model_folder,
        lines,
        lambda log, file: curve.draw_held_out(log, file, "Training of blocks", "nats per token"),
        plot,
        json,
    )

"""Commands that train diffusion models, what they are distilled into, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.cli.train.app import (
    Batch,
    Minutes,
    Out,
    Rate,
    Seed,
    Steps,
    Threads,
    app,
    held_out_lines,
    minutes_or_default,
    positive,
    report,
)
from anydecode.progress import note, progress
from anydecode.report import PlotFile

if TYPE_CHECKING:
    pass


@app.command("diffusion")
def train_diffusion(
    out: Out = Path("trained-diffusion"),
    minutes: Minutes = None,
    steps: Steps = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 64,
    noise: Annotated[
        str,
        typer.Option("--noise", help="Noise of the diffusion: mask, or uniform (random tokens)."),
    ] = "mask",
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the small model: next-token prediction first, then masked diffusion, or diffusion with
    random tokens as noise. A run with the same --out is resumed.

    Example: anydecode train diffusion --minutes 60 --threads 2 --out my-model --plot curve.svg
    """
    from anydecode.training import curve
    from anydecode.training.diffusion import STAGES, DiffusionRecipe, DiffusionRun, limit_threads

    minutes = minutes_or_default(minutes, steps)
    limit_threads(threads)
    recipe = DiffusionRecipe(minutes=minutes, steps=steps, batch=batch, seed=seed, noise=noise)
    run = DiffusionRun(out, recipe)
    if run.step:
        note(f"resuming from step {run.step} in {out}")
    with progress("training", 1.0, unit="percent", done=run.progress) as bar:

        def show(run: DiffusionRun) -> None:
            loss = next((e["loss"] for e in reversed(run.history) if "loss" in e), None)
            detail = "" if loss is None else f"loss {loss:.3f}"
            bar.update(run.progress, step=STAGES[run.stage], detail=detail)

        run.train(show)
    log = run.log()
    if plot is not None:
        curve.draw_training(log, plot)
    accuracy = next(e["accuracy"] for e in reversed(run.history) if "accuracy" in e)
    if json:
        print_json({"path": str(run.checkpoint), "accuracy": accuracy, **log})
        return
    for name, accuracy_of_task in accuracy.items():
        note(f"{name:16} {accuracy_of_task:.2f}")
    print(run.checkpoint)


@app.command("distil")
def train_distilled(
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="Distillation method: cd4lm or dparallel (for models that fill masks), duo (for"
            " models whose noise is random tokens), deer or specdiff-2.",
        ),
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="Diffusion model to start from.")] = (
        "tiny-diffusion"
    ),
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the new model, or of its adapter.")
    ] = Path("distilled"),
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 200,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 32,
    rate: Rate = 1e-4,
    block: Annotated[
        int,
        typer.Option(
            "--block", min=1, help="Block size (dparallel) or draft length (deer, specdiff-2)."
        ),
    ] = 8,
    rank: Annotated[
        int,
        typer.Option(
            "--rank", min=1, help="Rank of the adapter, for models of which not all weights train."
        ),
    ] = 16,
    target: Annotated[
        str,
        typer.Option("--target", help="Model that is drafted for (deer, specdiff-2)."),
    ] = "tiny-autoregressive",
    family: options.Family = None,
    mask: options.Mask = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Distil a diffusion model into one that needs fewer passes, or one that this package trained
    into a draft model (deer, specdiff-2). Where the layers are not those of Llama, Qwen2, Qwen3 or
    Qwen3-MoE, alike in all layers, an adapter is trained.

    Example: anydecode train distil --method dparallel --steps 200 --out tiny-dparallel
    """
    from anydecode.models.loading import resolve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.distillation import DistillationRecipe, distil

    recipe = DistillationRecipe(
        method,
        steps=steps,
        batch=batch,
        rate=rate,
        block=block,
        rank=rank,
        seed=seed,
        target=target,
    )
    limit_threads(threads)
    with progress("steps", steps) as bar:
        bar.begin(method)
        losses = distil(
            resolve(model),
            out,
            recipe,
            lambda step, loss: bar.update(step, detail=f"loss {loss:.3f}"),
            family,
            mask,
        )
    if json:
        print_json({"path": str(out), "method": method, "losses": losses})
    else:
        print(out)


@app.command("cj-grpo")
def train_decoding_path(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Masked-diffusion model without blocks.")
    ] = "tiny-diffusion",
    out: Annotated[Path, typer.Option("--out", help="Folder of the new model.")] = Path("cj-grpo"),
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Rounds, each with new answers.")
    ] = 50,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Questions per round.")] = 8,
    answers: Annotated[int, typer.Option("--answers", min=2, help="Answers per question.")] = 6,
    updates: Annotated[
        int, typer.Option("--updates", min=1, help="Updates of the weights per round.")
    ] = 8,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.", callback=positive)] = 1e-5,
    canvas: Annotated[int, typer.Option("--canvas", min=1, help="Canvas size in tokens.")] = 32,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Temperature of the answers.")
    ] = 1.0,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a diffusion model on right and wrong answers along its own decoding paths, for the
    decoder eoser-ass.

    Example: anydecode train cj-grpo --steps 50 --out tiny-paths
    """
    from anydecode.models.loading import resolve
    from anydecode.training.decoding_path import PathRecipe, train_on_paths
    from anydecode.training.diffusion import limit_threads

    recipe = PathRecipe(
        steps, questions, answers, updates, rate, canvas=canvas, temperature=temperature, seed=seed
    )
    limit_threads(threads)
    with progress("steps", steps) as bar:
        rewards = train_on_paths(
            resolve(model),
            out,
            recipe,
            lambda step, mean: bar.update(step, detail=f"{100 * mean:.0f}% right"),
        )
    if json:
        print_json({"path": str(out), "rewards": rewards})
    else:
        print(out)


@app.command("filter")
def train_commit_filter(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Masked-diffusion model to start from.")
    ] = ("tiny-diffusion"),
    out: Annotated[Path, typer.Option("--out", help="Output file.")] = Path("learn2pd.safetensors"),
    prompts: Annotated[
        int, typer.Option("--prompts", help="Number of prompts to learn from.")
    ] = 600,
    canvas: Annotated[int, typer.Option("--canvas", min=1, help="Canvas size in tokens.")] = 32,
    block: Annotated[
        int | None,
        typer.Option(
            "--block",
            min=1,
            help="Block size that the filter is for; it must divide the canvas. Default: that of"
            " the model, or else 32.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Training epochs.")] = 4000,
    family: options.Family = None,
    mask: options.Mask = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the commit filter of Learn2PD for a diffusion model.

    Example: anydecode train filter --prompts 600 --out learn2pd.safetensors
    """
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.filters import train_filter

    limit_threads(threads)
    with progress("epochs", epochs) as bar:
        bar.begin("decoding")
        results = train_filter(
            model,
            out,
            prompts=prompts,
            canvas=canvas,
            block=block,
            epochs=epochs,
            seed=seed,
            report=lambda epoch, loss: bar.update(epoch, step="filter", detail=f"loss {loss:.3f}"),
            family=family,
            mask=mask,
        )
    if json:
        print_json({"path": str(out), **results})
        return
    for name, value in results.items():
        note(f"{name:10} {value:.3f}" if isinstance(value, float) else f"{name:10} {value}")
    print(out)


@app.command("block-adapter")
def train_adapter(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model of the Llama family to adapt.")
    ] = (options.DEFAULT_MODEL),
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Output folder of the adapter, or one of an interrupted run to resume."
        ),
    ] = Path("block-adapter"),
    init: Annotated[
        str | None,
        typer.Option(
            "--init",
            help="Adapter to start from: a folder, or smollm2-135m-blocks. Default: a new one.",
        ),
    ] = None,
    merged: Annotated[
        Path | None,
        typer.Option(
            "--merged",
            help=(
                "Also write a block-diffusion model"
                " with merged weights to this"
                " folder. Default: not written."
            ),
        ),
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    block: Annotated[int, typer.Option("--block", min=1, help="Block size in tokens.")] = 8,
    first_block: Annotated[
        int | None,
        typer.Option(
            "--first-block",
            min=1,
            help="Block size at first, which doubles up to --block. Default: --block.",
        ),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    batch: Batch = 2,
    rate: Rate = 1e-3,
    mask: Annotated[
        int | None,
        typer.Option("--mask", help="Id of the mask token. Default: an unused special token."),
    ] = None,
    own: Annotated[
        int,
        typer.Option("--own", min=0, help="Number of the model's own answers to train on as well."),
    ] = 0,
    copies: Annotated[int, typer.Option("--copies", min=1, help="Masked copies per text.")] = 1,
    shift: Annotated[
        bool,
        typer.Option(
            "--shift/--in-place",
            help="Row i predicts token i + 1 (--shift) or token i (--in-place).",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of weights and passes: float32 or bfloat16.")
    ] = "float32",
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a low-rank adapter with which an autoregressive model denoises blocks. A run with the
    same --out is resumed.

    Example: anydecode train block-adapter --minutes 60 --own 100 --shift --out smollm2-blocks
    """
    from anydecode.models.loading import load_checkpoint, resolve
    from anydecode.training import curve
    from anydecode.training.block_adapter import AdapterRecipe, train_block_adapter
    from anydecode.training.diffusion import limit_threads

    minutes = minutes_or_default(minutes, steps)
    recipe = AdapterRecipe(
        minutes,
        steps,
        block=block,
        rank=rank,
        batch=batch,
        rate=rate,
        seed=seed,
        copies=copies,
        shift=shift,
        dtype=dtype,
        first_block=first_block,
    )
    limit_threads(threads)
    with progress("training", 1.0, unit="percent") as bar:
        run = train_block_adapter(
            load_checkpoint(model),
            out,
            recipe,
            mask,
            own,
            lambda done, loss: bar.update(done, detail=f"loss {loss:.3f}"),
            merged,
            model,
            None if init is None else resolve(init),
        )
    report(
        run,
        out,
        [*held_out_lines(run, "{name}", " nats per masked token"), f"{run.step} steps"],
        curve.draw_held_out,
        plot,
        json,
    )

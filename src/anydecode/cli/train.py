"""`anydecode train`: small models, distillation and adapters, trained on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import note, print_json, progress

app = typer.Typer(
    help="Train small models on this machine.\n\nExample: anydecode train diffusion --minutes 10",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Minutes = Annotated[float | None, typer.Option("--minutes", help="How long to train.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Instead: how many steps to train.")]
Out = Annotated[Path, typer.Option("--out", help="A new folder, or one to go on from.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the data and the weights.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="0: every core.")]


@app.command("diffusion")
def train_diffusion(
    out: Out = Path("trained-diffusion"),
    minutes: Minutes = None,
    steps: Steps = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 64,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the curve as SVG.")] = None,
    json: options.Json = False,
) -> None:
    """Train the small model: next tokens first, then masked diffusion. Begun again, it goes on.

    Example: anydecode train diffusion --minutes 60 --threads 2 --out my-model --plot curve.svg
    """
    from anydecode.training import curve
    from anydecode.training.diffusion import STAGES, Recipe, Run, limit_threads

    if minutes is None and steps is None:
        minutes = 60.0
    limit_threads(threads)
    run = Run(out, Recipe(minutes=minutes, steps=steps, batch=batch, seed=seed))
    if run.step:
        note(f"going on from step {run.step} in {out}")
    with progress() as bar:
        task = bar.add_task(STAGES[run.stage], total=100)

        def show(run: Run) -> None:
            loss = next((e["loss"] for e in reversed(run.history) if "loss" in e), None)
            told = STAGES[run.stage] + ("" if loss is None else f", loss {loss:.3f}")
            bar.update(task, completed=int(100 * run.progress), description=told)

        run.train(show)
    log = run.log()
    if plot is not None:
        plot.write_text(curve.to_svg(log), encoding="utf-8")
    accuracy = next(e["accuracy"] for e in reversed(run.history) if "accuracy" in e)
    if json:
        print_json({"path": str(run.checkpoint), "accuracy": accuracy, **log})
        return
    for name, share in accuracy.items():
        note(f"{name:16} {share:.2f}")
    print(run.checkpoint)


@app.command("distil")
def train_distilled(
    method: Annotated[str, typer.Option("--method", help="cd4lm or dparallel.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A masked-diffusion model.")] = (
        "tiny-diffusion"
    ),
    out: Annotated[Path, typer.Option("--out", help="Folder of the new model.")] = Path(
        "distilled"
    ),
    steps: Annotated[int, typer.Option("--steps", min=1)] = 200,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Questions per step.")] = 32,
    rate: Annotated[float, typer.Option("--rate", help="Peak learning rate.")] = 1e-4,
    block: Annotated[int, typer.Option("--block", min=1, help="Block size (dparallel).")] = 8,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Distil a diffusion model that this package trained into one that needs fewer passes.

    Example: anydecode train distil --method dparallel --steps 200 --out tiny-dparallel
    """
    from anydecode.models.loading import resolve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.distillation import Plan, distil

    plan = Plan(method, steps=steps, batch=batch, rate=rate, block=block, seed=seed)
    limit_threads(threads)
    with progress() as bar:
        task = bar.add_task(method, total=steps)
        losses = distil(
            resolve(model),
            out,
            plan,
            lambda step, loss: bar.update(
                task, completed=step, description=f"{method}, loss {loss:.3f}"
            ),
        )
    if json:
        print_json({"path": str(out), "method": method, "losses": losses})
    else:
        print(out)


@app.command("filter")
def train_commit_filter(
    model: Annotated[str, typer.Option("--model", "-m", help="A masked-diffusion model.")] = (
        "tiny-diffusion"
    ),
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path(
        "learn2pd.safetensors"
    ),
    prompts: Annotated[int, typer.Option("--prompts", help="Questions to learn from.")] = 600,
    canvas: Annotated[int, typer.Option("--canvas", min=1, help="Tokens of an answer.")] = 32,
    block: Annotated[int, typer.Option("--block", min=1, help="The block it is for.")] = 32,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 4000,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the commit filter of Learn2PD for a diffusion model that this package trained.

    Example: anydecode train filter --prompts 600 --out learn2pd.safetensors
    """
    from anydecode.models.loading import resolve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.filters import train_filter

    limit_threads(threads)
    with progress() as bar:
        task = bar.add_task("decoding", total=epochs)
        found = train_filter(
            resolve(model),
            out,
            prompts=prompts,
            canvas=canvas,
            block=block,
            epochs=epochs,
            seed=seed,
            report=lambda epoch, loss: bar.update(
                task, completed=epoch, description=f"filter, loss {loss:.3f}"
            ),
        )
    if json:
        print_json({"path": str(out), **found})
        return
    for name, value in found.items():
        note(f"{name:10} {value:.3f}" if isinstance(value, float) else f"{name:10} {value}")
    print(out)


@app.command("block-adapter")
def train_adapter(
    model: Annotated[str, typer.Option("--model", "-m", help="A Llama-shaped model.")] = (
        options.DEFAULT_MODEL
    ),
    out: Annotated[Path, typer.Option("--out", help="Folder of the adapter.")] = Path(
        "block-adapter"
    ),
    merged: Annotated[
        Path | None, typer.Option("--merged", help="Write a block-diffusion model here.")
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens of a block.")] = 8,
    rank: Annotated[int, typer.Option("--rank", min=1)] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts per step.")] = 8,
    rate: Annotated[float, typer.Option("--rate", help="Peak learning rate.")] = 1e-3,
    mask: Annotated[
        int | None, typer.Option("--mask", help="The token that stands for a mask.")
    ] = None,
    own: Annotated[
        int, typer.Option("--own", min=0, help="Also learn so many answers of the model's own.")
    ] = 0,
    copies: Annotated[int, typer.Option("--copies", min=1, help="Noisings of a text.")] = 1,
    shift: Annotated[
        bool, typer.Option("--shift/--in-place", help="Row i predicts token i + 1, or token i.")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the passes: float32 or bfloat16.")
    ] = "float32",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the curve as SVG.")] = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a low-rank adapter with which an autoregressive model denoises blocks. Begun again, it
    goes on.

    Example: anydecode train block-adapter --minutes 60 --own 100 --shift --out smollm2-blocks
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.block_adapter import AdapterRecipe, train_block_adapter
    from anydecode.training.diffusion import limit_threads

    if minutes is None and steps is None:
        minutes = 60.0
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
    )
    limit_threads(threads)
    with progress() as bar:
        task = bar.add_task("block adapter", total=100)
        run = train_block_adapter(
            load_checkpoint(model),
            out,
            recipe,
            mask,
            own,
            lambda done, loss: bar.update(
                task, completed=int(100 * done), description=f"block adapter, loss {loss:.3f}"
            ),
            merged,
            model,
        )
    if plot is not None:
        plot.write_text(curve.of_held_out(run.log()), encoding="utf-8")
    if json:
        print_json({"path": str(out), **run.log()})
        return
    first, *_, last = [entry["held_out"] for entry in run.history if "held_out" in entry]
    for name in last:
        note(f"{name}: {first[name]:.3f} -> {last[name]:.3f} nats per masked token")
    note(f"{run.step} steps")
    print(out)


@app.command("autodeco")
def train_autodeco_heads(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path(
        "autodeco.safetensors"
    ),
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="One a line; else the model asks itself."),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=2, help="Prompts it asks itself.")] = 160,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers per prompt.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")] = 64,
    width: Annotated[int, typer.Option("--width", min=1, help="Of the heads.")] = 64,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 12,
    rate: Annotated[float, typer.Option("--rate", help="The learning rate.")] = 5e-4,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Weigh tokens as the authors do.")
    ] = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train heads that say temperature and top-p for every token, on the model's own text.

    Example: anydecode train autodeco --count 40 --out my-heads.safetensors
    """
    from dataclasses import asdict

    from anydecode.training.autodeco import Recipe, train_autodeco
    from anydecode.training.diffusion import limit_threads

    limit_threads(threads)
    recipe = Recipe(
        prompts=count,
        samples=samples,
        tokens=tokens,
        width=width,
        epochs=epochs,
        rate=rate,
        weighted=weighted,
        seed=seed,
    )
    lines = [] if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
    llm = options.load(model, None, threads or None)
    with progress() as bar:
        task = bar.add_task("own text", total=epochs)
        learner, gain = train_autodeco(
            llm,
            recipe,
            [line for line in lines if line.strip()],
            lambda done, loss: bar.update(task, completed=done + 1, description=f"loss {loss:.3f}"),
        )
    learner.heads().save(out)
    if json:
        print_json({"path": str(out), **asdict(gain)})
        return
    note(gain.told())
    print(out)

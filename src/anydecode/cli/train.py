"""`anydecode train`: train small models, distilled models and adapters on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.progress import note, progress
from anydecode.report import PlotFile

if TYPE_CHECKING:
    from anydecode.models.checkpoint import Checkpoint
    from anydecode.models.tokenizer import Tokenizer
    from anydecode.training.block_adapter import Pair
    from anydecode.training.exit_run import ExitRecipe, ExitRun
    from anydecode.training.pair_run import PairRun
    from anydecode.training.run import LossRun

Run = TypeVar("Run", bound="LossRun")

app = typer.Typer(
    help="Train small models on this machine.\n\nExample: anydecode train diffusion --minutes 10",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes", help="Training time in minutes. Default: 60, unless --steps is given."
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Number of training steps, instead of --minutes.")
]
Out = Annotated[
    Path, typer.Option("--out", help="New output folder, or one of an interrupted run to resume.")
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of data and weights.")]
Threads = Annotated[
    int, typer.Option("--threads", min=0, help="Number of CPU threads; 0: torch's default.")
]
LlamaModel = Annotated[str, typer.Option("--model", "-m", help="Model of the Llama family.")]
Encoder = Annotated[
    str, typer.Option("--encoder", help="Sentence encoder, a model for embeddings.")
]
Answers = Annotated[
    int, typer.Option("--answers", min=2, help="Number of the model's answers to learn from.")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Texts per step.")]
Rate = Annotated[float, typer.Option("--rate", help="Peak learning rate.")]


def _minutes(minutes: float | None, steps: int | None) -> float | None:
    """The minutes to train: 60 if neither these nor steps are given."""
    return 60.0 if minutes is None and steps is None else minutes


def _trained(open_run: Callable[[], Run], step: str) -> Run:
    """The run that `open_run` opens, which may generate answers, after its training."""
    with progress("training", 1.0, unit="percent") as bar:
        bar.begin("answers")
        run = open_run()
        run.train(lambda done, loss: bar.update(done, step=step, detail=f"loss {loss:.3f}"))
    return run


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

    minutes = _minutes(minutes, steps)
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
            help="Distillation method: cd4lm, dparallel, duo (for models whose noise is random"
            " tokens), deer or specdiff-2.",
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Masked-diffusion model to start from.")
    ] = ("tiny-diffusion"),
    out: Annotated[Path, typer.Option("--out", help="Folder of the new model.")] = Path(
        "distilled"
    ),
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 200,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 32,
    rate: Rate = 1e-4,
    block: Annotated[
        int,
        typer.Option(
            "--block", min=1, help="Block size (dparallel) or draft length (deer, specdiff-2)."
        ),
    ] = 8,
    target: Annotated[
        str,
        typer.Option("--target", help="Model that is drafted for (deer, specdiff-2)."),
    ] = "tiny-autoregressive",
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Distil a diffusion model into one that needs fewer passes (one with the layers of Llama,
    Qwen2 or Qwen3), or one that this package trained into a draft model (deer, specdiff-2).

    Example: anydecode train distil --method dparallel --steps 200 --out tiny-dparallel
    """
    from anydecode.models.loading import resolve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.distillation import DistillationRecipe, distil

    recipe = DistillationRecipe(
        method, steps=steps, batch=batch, rate=rate, block=block, seed=seed, target=target
    )
    limit_threads(threads)
    with progress("steps", steps) as bar:
        bar.begin(method)
        losses = distil(
            resolve(model),
            out,
            recipe,
            lambda step, loss: bar.update(step, detail=f"loss {loss:.3f}"),
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
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.")] = 1e-5,
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
        int,
        typer.Option(
            "--block", min=1, help="Block size that the filter is for; it must divide the canvas."
        ),
    ] = 32,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Training epochs.")] = 4000,
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
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.block_adapter import AdapterRecipe, train_block_adapter
    from anydecode.training.diffusion import limit_threads

    minutes = _minutes(minutes, steps)
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
        )
    if plot is not None:
        curve.draw_held_out(run.log(), plot)
    if json:
        print_json({"path": str(out), **run.log()})
        return
    first, *_, last = [entry["held_out"] for entry in run.history if "held_out" in entry]
    for name in last:
        note(f"{name}: {first[name]:.3f} -> {last[name]:.3f} nats per masked token")
    note(f"{run.step} steps")
    print(out)


@app.command("nested")
def train_nested_draft(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Annotated[Path, typer.Option("--out", help="Folder of the new model.")] = Path("nested"),
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="Number of first layers. Default: half of them.")
    ] = 0,
    exits: Annotated[
        str, typer.Option("--exits", help="Exits as fractions of these layers, as of s2d.")
    ] = "0.5-0.75",
    answers: Annotated[
        int, typer.Option("--answers", min=1, help="Number of the model's answers to learn from.")
    ] = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 200,
    batch: Batch = 4,
    rate: Rate = 2e-4,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the first layers of a model as a draft model that predicts tokens at several exits
    (sorted fine-tuning), for the decoder s2d.

    Example: anydecode train nested --layers 12 --steps 500 --out my-nested
    """
    from anydecode.decoders.speculative.s2d import exit_fractions
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.nested import NestedRecipe, train_nested

    recipe = NestedRecipe(
        layers,
        exit_fractions(exits),
        answers=answers,
        steps=steps,
        batch=batch,
        rate=rate,
        seed=seed,
    )
    limit_threads(threads)
    with progress("steps", steps) as bar:
        losses = train_nested(
            load_checkpoint(model),
            out,
            recipe,
            lambda step, loss: bar.update(step, detail=f"loss {loss:.3f}"),
        )
    if json:
        print_json({"path": str(out), "losses": losses})
    else:
        print(out)


@app.command("depth")
def train_depth(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-depth"),
    minutes: Minutes = None,
    steps: Steps = None,
    answers: Answers = 256,
    batch: Batch = 4,
    rate: Rate = 3e-5,
    dropout: Annotated[
        float, typer.Option("--dropout", help="Probability that the last layer is left out.")
    ] = 0.1,
    exit_scale: Annotated[
        float, typer.Option("--exit-scale", help="Weight of the losses at the exits.")
    ] = 0.2,
    every: Annotated[
        int, typer.Option("--every", min=1, help="Distance of the exits that a step has losses at.")
    ] = 8,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a whole model, with layer dropout and losses at its exits, so that its first layers
    predict what all of them do, for the decoders layerskip and del. A run with the same --out is
    resumed. The model is in the folder "model" of --out.

    Example: anydecode train depth --minutes 60 --out my-model --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.layerskip import LayerSkipRecipe, LayerSkipRun

    minutes = _minutes(minutes, steps)
    settings = LayerSkipRecipe(
        minutes,
        steps,
        answers=answers,
        batch=batch,
        rate=rate,
        dropout=dropout,
        exit_scale=exit_scale,
        every=every,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: LayerSkipRun(load_checkpoint(model), out, settings), "model")
    if plot is not None:
        curve.draw_agreement(run.log(), plot)
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.agreements()
    layer = max(1, run.num_layers // 3)
    note(
        f"after {layer} of {run.num_layers} layers the token of the last one:"
        f" {first[layer - 1]:.3f} -> {last[layer - 1]:.3f} of held-out answers"
    )
    print(run.model_folder)


@app.command("schedule")
def train_on_schedule(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-schedule"),
    minutes: Minutes = None,
    steps: Steps = None,
    decoder: Annotated[
        str, typer.Option("--decoder", help="The decoder that will use the model.")
    ] = "skipdecode",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="The limit of tokens, where the schedule ends.")
    ] = 64,
    answers: Answers = 256,
    batch: Batch = 4,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model whose answers run fewer layers the further they have come, for the decoder
    skipdecode. A run with the same --out is resumed. The model is in the folder "model" of --out.

    Example: anydecode train schedule --minutes 60 --tokens 128 --out my-model --plot curve.svg
    """
    from anydecode.catalogue import build_as
    from anydecode.decoders.depth.skipdecode import SkipDecode
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.schedule import ScheduleRecipe, ScheduleRun

    minutes = _minutes(minutes, steps)
    recipe = ScheduleRecipe(
        minutes,
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rank=rank,
        rate=rate,
        seed=seed,
    )
    built = build_as(decoder, "the decoder skipdecode", SkipDecode)
    limit_threads(threads)
    run = _trained(lambda: ScheduleRun(load_checkpoint(model), out, recipe, built), "schedule")
    if plot is not None:
        curve.draw_held_out(run.log(), plot, "Training on a schedule of layers", "nats per token")
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.held_out_losses()
    note(f"held-out answers on the schedule: {first:.3f} -> {last:.3f} nats per token")
    print(run.model_folder)


@app.command("consistency")
def train_consistency(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-consistency"),
    minutes: Minutes = None,
    steps: Steps = None,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens per block.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of an answer.")] = 64,
    answers: Answers = 64,
    batch: Batch = 4,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 3e-4,
    text_weight: Annotated[
        float,
        typer.Option("--text-weight", help="Weight of the loss of plain decoding's tokens."),
    ] = 1.0,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model whose blocks of Jacobi iteration settle in fewer passes, for the decoder ceed.
    A run with the same --out is resumed. The model is in the folder "model" of --out.

    Example: anydecode train consistency --minutes 60 --out my-model
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.block_consistency import BlockRecipe, BlockRun
    from anydecode.training.diffusion import limit_threads

    minutes = _minutes(minutes, steps)
    recipe = BlockRecipe(
        minutes,
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rank=rank,
        rate=rate,
        block=block,
        text_weight=text_weight,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: BlockRun(load_checkpoint(model), out, recipe), "blocks")
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.results()
    for name in first:
        note(f"{name} in held-out blocks: {first[name]:.3f} -> {last[name]:.3f}")
    print(run.model_folder)


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
    from anydecode.training.diffusion import limit_threads

    minutes = _minutes(minutes, steps)
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
    limit_threads(threads)
    run = _trained(lambda: BlockRun(out, recipe), "blocks")
    if plot is not None:
        curve.draw_held_out(run.log(), plot, "Training of blocks", "nats per token")
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.unused()
    for size, share in last.items():
        tokens = "a token leaves" if size == 1 else f"{size} tokens leave"
        note(f"blocks that {tokens} unused: {first[size]:.3f} -> {share:.3f}")
    print(run.model_folder)


@app.command("heads")
def train_exit_heads(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-heads"),
    minutes: Minutes = None,
    steps: Steps = None,
    decoder: Annotated[
        str, typer.Option("--decoder", help="The decoder that will use them, with its exits.")
    ] = "specbound",
    answers: Answers = 256,
    batch: Batch = 4,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a light head for each exit of a model, for the decoder specbound. The model stays as it
    is. A run with the same --out is resumed. The heads are in the file "heads.safetensors" of
    --out.

    Example: anydecode train heads --minutes 60 --out my-heads --plot curve.svg
    """
    from anydecode.catalogue import build_as
    from anydecode.decoders.depth.specbound import SpecBound
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.exit_heads import HeadRecipe, HeadRun

    minutes = _minutes(minutes, steps)
    recipe = HeadRecipe(minutes, steps, answers=answers, batch=batch, rate=rate, seed=seed)
    exits = build_as(decoder, "the decoder specbound", SpecBound).exits
    limit_threads(threads)
    run = _trained(lambda: HeadRun(load_checkpoint(model), out, recipe, exits), "heads")
    if plot is not None:
        curve.draw_agreement(run.log(), plot)
    if json:
        print_json({"path": str(run.file), **run.log()})
        return
    first, *_, last = run.agreements()
    note("tokens of held-out answers that each exit predicts as the last layer does:")
    for exit, before, after in zip(run.exits, first, last, strict=True):
        note(f"after {exit} layers {before:.3f} -> {after:.3f}")
    print(run.file)


@app.command("masks")
def train_masks(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-masks"),
    minutes: Minutes = None,
    steps: Steps = None,
    masks: Annotated[
        int, typer.Option("--masks", min=1, help="Number of masks, which predict a token each.")
    ] = 2,
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of masks per text and step.")
    ] = 16,
    answers: Answers = 256,
    batch: Batch = 4,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 1e-3,
    mask: Annotated[
        int | None,
        typer.Option("--mask", help="Id of the mask token. Default: an unused special token."),
    ] = None,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model to predict several tokens at mask tokens behind its text, for the decoders
    space and mars. A run with the same --out is resumed. The model is in the folder "model" of
    --out.

    Example: anydecode train masks --minutes 60 --out my-model --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.masks import MaskRecipe, MaskRun

    minutes = _minutes(minutes, steps)
    recipe = MaskRecipe(
        minutes,
        steps,
        masks=masks,
        groups=groups,
        answers=answers,
        batch=batch,
        rank=rank,
        rate=rate,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: MaskRun(load_checkpoint(model), out, recipe, mask), "masks")
    if plot is not None:
        curve.draw_acceptance(run.log(), plot)
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    (text, _), *_, (last, shares) = run.shares()
    note(f"tokens of held-out answers that the text's rows predict: {text:.3f} -> {last:.3f}")
    note("and each mask: " + " ".join(f"{share:.3f}" for share in shares))
    print(run.model_folder)


@app.command("future-masks")
def train_future_masks(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-future-masks"),
    minutes: Minutes = None,
    steps: Steps = None,
    masks: Annotated[
        int,
        typer.Option(
            "--masks", min=1, max=32, help="Number of mask tokens, which predict a token each."
        ),
    ] = 2,
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of masks per text and step.")
    ] = 16,
    answers: Answers = 256,
    batch: Batch = 4,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 8,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train mask tokens at which a model predicts several tokens, an adapter for their rows alone
    and a head that reads the token before, for the decoder mtp-future. The model stays as it is. A
    run with the same --out is resumed. The results are in the folder "future_masks" of --out.

    Example: anydecode train future-masks --minutes 60 --out my-masks --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.future_masks import FutureRecipe, FutureRun

    minutes = _minutes(minutes, steps)
    recipe = FutureRecipe(
        minutes,
        steps,
        masks=masks,
        groups=groups,
        answers=answers,
        batch=batch,
        rank=rank,
        rate=rate,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: FutureRun(load_checkpoint(model), out, recipe), "masks")
    if plot is not None:
        curve.draw_acceptance(run.log(), plot)
    if json:
        print_json({"path": str(run.parts_folder), **run.log()})
        return
    *_, (_, shares) = run.shares()
    note("tokens of held-out answers that each mask predicts: "
         + " ".join(f"{share:.3f}" for share in shares))  # fmt: skip
    print(run.parts_folder)


@app.command("hidden-transfer")
def train_hidden_transfer(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-transfer"),
    minutes: Minutes = None,
    steps: Steps = None,
    states: Annotated[
        int,
        typer.Option(
            "--states", min=1, max=16, help="Number of pseudo states, which predict a token each."
        ),
    ] = 2,
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            help="Number of layers before each pseudo state, such as 20,22, in place of --states."
            " Default: two thirds of the model's.",
        ),
    ] = "",
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of pseudo states per text and step.")
    ] = 16,
    answers: Answers = 256,
    batch: Batch = 4,
    rate: Rate = 3e-4,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train linear maps that predict, from a token's state at a layer, those of the tokens behind
    it, for the decoder hidden-transfer. The model stays as it is. A run with the same --out is
    resumed. The maps are in the file "hidden_transfer.safetensors" of --out.

    Example: anydecode train hidden-transfer --minutes 60 --out my-maps --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.hidden_transfer import TransferRecipe, TransferRun

    minutes = _minutes(minutes, steps)
    try:
        chosen = tuple(int(layer) for layer in layers.split(",") if layers)
    except ValueError:
        raise InvalidRequestError(
            f"--layers is {layers!r}; allowed are integers with commas, such as 20,22"
        ) from None
    recipe = TransferRecipe(
        minutes,
        steps,
        masks=len(chosen) or states,
        groups=groups,
        answers=answers,
        batch=batch,
        rate=rate,
        seed=seed,
        layers=chosen,
    )
    limit_threads(threads)
    run = _trained(lambda: TransferRun(load_checkpoint(model), out, recipe), "maps")
    if plot is not None:
        curve.draw_acceptance(run.log(), plot)
    if json:
        print_json({"path": str(run.file), **run.log()})
        return
    *_, (_, shares) = run.shares()
    note("tokens of held-out answers that each pseudo state predicts: "
         + " ".join(f"{share:.3f}" for share in shares))  # fmt: skip
    print(run.file)


PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="File with one prompt per line. Default: the model generates them.",
    ),
]
ExitSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Number of steps, each over all rows. Default: 100, unless --minutes is given.",
    ),
]
ExitMinutes = Annotated[
    float | None, typer.Option("--minutes", help="Training time in minutes, instead of --steps.")
]
AnswerTokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")]


@app.command("routers")
def train_exit_routers(
    out: Out = Path("trained-routers"),
    model: options.Model = options.DEFAULT_MODEL,
    label: Annotated[
        str,
        typer.Option(
            "--label",
            help="What a router predicts: cosine (with the last layer's state) or token (whether"
            " it is the last layer's).",
        ),
    ] = "cosine",
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", min=1, help="With --label token: the last layer's most probable tokens."
        ),
    ] = 1,
    interval: Annotated[
        int, typer.Option("--interval", min=1, help="Layers from one exit to the next.")
    ] = 4,
    minutes: ExitMinutes = None,
    steps: ExitSteps = None,
    prompts: PromptsFile = None,
    answers: Answers = 64,
    tokens: AnswerTokens = 96,
    rate: Rate = 1e-3,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the routers with which tide and dynamax leave layers out, on the model's own answers.
    A run with the same --out is resumed.

    Example: anydecode train routers --label token --answers 16 --out my-routers --plot curve.svg
    """
    from anydecode.training.exit_routers import RouterRecipe, RouterRun

    recipe = RouterRecipe(
        minutes=minutes,
        steps=100 if minutes is None and steps is None else steps,
        label=label,  # type: ignore[arg-type]
        top_k=top_k,
        interval=interval,
        answers=answers,
        tokens=tokens,
        rate=rate,
        seed=seed,
    )
    _train_exits(RouterRun, recipe, model, None, out, prompts, threads, plot, json)


@app.command("predictors")
def train_exit_predictors(
    out: Out = Path("trained-predictors"),
    model: options.Model = options.DEFAULT_MODEL,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="Draft model or drafter. Default: the drafter of the default model."
        ),
    ] = None,
    always: Annotated[
        int, typer.Option("--always", min=1, help="Number of exits that every token checks.")
    ] = 8,
    minutes: ExitMinutes = None,
    steps: ExitSteps = None,
    prompts: PromptsFile = None,
    answers: Answers = 64,
    tokens: AnswerTokens = 96,
    rate: Rate = 1e-3,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the predictors with which specee leaves layers out, on the model's own answers. A run
    with the same --out is resumed.

    Example: anydecode train predictors --answers 16 --out my-predictors --plot curve.svg
    """
    from anydecode.training.exit_predictors import PredictorRecipe, PredictorRun

    recipe = PredictorRecipe(
        minutes=minutes,
        steps=100 if minutes is None and steps is None else steps,
        always=always,
        answers=answers,
        tokens=tokens,
        rate=rate,
        seed=seed,
    )
    _train_exits(PredictorRun, recipe, model, draft, out, prompts, threads, plot, json)


@app.command("layer-routers")
def train_layer_routers(
    out: Out = Path("trained-layer-routers"),
    model: LlamaModel = options.DEFAULT_MODEL,
    minutes: Minutes = None,
    steps: Steps = None,
    penalty: Annotated[
        float, typer.Option("--penalty", min=0.0, help="Nats per layer that runs.")
    ] = 0.01,
    first: Annotated[
        int, typer.Option("--first", min=0, help="Layers at the bottom that always run.")
    ] = 2,
    last: Annotated[
        int, typer.Option("--last", min=0, help="Layers at the top that always run.")
    ] = 1,
    answers: Answers = 64,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 1e-2,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the routers with which first-router chooses layers by the prompt, on the model's own
    answers. A run with the same --out is resumed.

    Example: anydecode train layer-routers --steps 200 --penalty 0.05 --out my-layers
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.layer_routers import LayerRouterRecipe, LayerRouterRun

    recipe = LayerRouterRecipe(
        minutes=_minutes(minutes, steps),
        steps=steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        penalty=penalty,
        first=first,
        last=last,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: LayerRouterRun(load_checkpoint(model), out, recipe), "routers")
    if plot is not None:
        curve.draw_held_out(run.log(), plot, "Training of layer routers", "nats per token")
    results = run.results()
    if json:
        print_json({"path": str(run.path), "results": results, **run.log()})
        return
    skipped = len(results["runs"]) - sum(results["runs"])
    note(
        f"held-out texts skip {skipped:.1f} layers on average, with"
        f" {results['held_out']['layers skipped']:.3f} nats per token"
    )
    print(run.path)


@app.command("layer-adapter")
def train_layer_adapter(
    routers: Annotated[
        Path, typer.Option("--routers", help="The file of `anydecode train layer-routers`.")
    ],
    out: Out = Path("trained-layer-adapter"),
    model: LlamaModel = options.DEFAULT_MODEL,
    minutes: Minutes = None,
    steps: Steps = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Probability from which on a layer runs.")
    ] = 0.5,
    answers: Answers = 64,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 3e-4,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train a model for the layers that its routers choose, for first-router. A run with the same
    --out is resumed. The model, with its routers, is in the folder "model" of --out.

    Example: anydecode train layer-adapter --routers my-layers/layer_routers.safetensors
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.layer_adapter import LayerAdapterRecipe, LayerAdapterRun

    minutes = _minutes(minutes, steps)
    recipe = LayerAdapterRecipe(
        minutes,
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rank=rank,
        rate=rate,
        threshold=threshold,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: LayerAdapterRun(load_checkpoint(model), out, recipe, routers), "adapter")
    if plot is not None:
        curve.draw_held_out(run.log(), plot, "Training with routed layers", "nats per token")
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.held_out_losses()
    note(f"held-out answers without layers: {first:.3f} -> {last:.3f} nats per token")
    print(run.model_folder)


@app.command("small-mlps")
def train_small_mlps(
    out: Out = Path("trained-small-mlps"),
    model: LlamaModel = options.DEFAULT_MODEL,
    minutes: Minutes = None,
    steps: Steps = None,
    width: Annotated[int, typer.Option("--width", min=1, help="Inner width of a small MLP.")] = 96,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="Layers in the middle that have one.")
    ] = 8,
    answers: Answers = 64,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 1e-3,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the small MLPs with which duo-llm replaces those of the model. A run with the same
    --out is resumed.

    Example: anydecode train small-mlps --steps 200 --out my-mlps
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.small_mlps import SmallMlpRecipe, SmallMlpRun

    recipe = SmallMlpRecipe(
        _minutes(minutes, steps),
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        width=width,
        layers=layers,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: SmallMlpRun(load_checkpoint(model), out, recipe), "small MLPs")
    if plot is not None:
        curve.draw_held_out(run.log(), plot, "Training of small MLPs", "nats per token")
    if json:
        print_json({"path": str(run.path), **run.log()})
        return
    first, *_, last = run.results()
    for name in first:
        note(f"held-out answers, {name}: {first[name]:.3f} -> {last[name]:.3f} nats per token")
    print(run.path)


def _train_exits(
    open_run: Callable[..., ExitRun],
    recipe: ExitRecipe,
    model: str,
    draft: str | None,
    out: Path,
    prompts: Path | None,
    threads: int,
    plot: Path | None,
    json: bool,
) -> None:
    from dataclasses import asdict

    from anydecode.api.llm import LLM
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads

    lines = [] if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
    limit_threads(threads)
    with (
        LLM(model, draft=draft, threads=threads or None) as llm,
        progress("training", 1.0, unit="percent") as bar,
    ):
        run = open_run(
            llm, out, recipe, lines, lambda step, done: bar.update(0.9 * done, step=step)
        )
        run.train(lambda done, loss: bar.update(done, step="exits", detail=f"loss {loss:.3f}"))
    if plot is not None:
        curve.draw_exits(run.log(), plot)
    qualities = run.qualities()
    if json:
        exits = [asdict(one) for one in qualities]
        print_json({"path": str(run.path), "exits": exits, **run.log()})
        return
    for one in qualities:
        note(
            f"after {one.exit} layers: {one.share:.1%} of held-out rows may leave,"
            f" {one.chosen:.1%} do, {one.precision:.1%} of these may"
        )
    print(run.path)


@app.command("prompts")
def train_prompts(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-prompts"),
    minutes: Minutes = None,
    steps: Steps = None,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts", min=1, max=16, help="Number of prompt tokens, which predict a token each."
        ),
    ] = 3,
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of prompt tokens per text and step.")
    ] = 16,
    answers: Answers = 256,
    batch: Batch = 4,
    rate: Rate = 1e-2,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train prompt tokens, embeddings at which a model predicts several tokens, for the decoder
    ppd. The model stays as it is. A run with the same --out is resumed. The prompt tokens are in
    the file "prompts.safetensors" of --out.

    Example: anydecode train prompts --minutes 60 --out my-prompts --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.masks import PromptRecipe, PromptRun

    minutes = _minutes(minutes, steps)
    recipe = PromptRecipe(
        minutes,
        steps,
        masks=prompts,
        groups=groups,
        answers=answers,
        batch=batch,
        rate=rate,
        seed=seed,
    )
    limit_threads(threads)
    run = _trained(lambda: PromptRun(load_checkpoint(model), out, recipe), "prompts")
    if plot is not None:
        curve.draw_acceptance(run.log(), plot)
    if json:
        print_json({"path": str(run.file), **run.log()})
        return
    *_, (_, shares) = run.shares()
    note("tokens of held-out answers that each prompt token predicts: "
         + " ".join(f"{share:.3f}" for share in shares))  # fmt: skip
    print(run.file)


@app.command("drafter")
def train_drafter(
    model: Annotated[str, typer.Option("--model", "-m", help="Model to draft for.")] = (
        options.DEFAULT_MODEL
    ),
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="eagle-3, eagle, medusa, hydra, hydra++, blockwise, clover, chimera, falcon,"
            " dflash, dspark, p-eagle, parallelspec, early-exit, kangaroo or longspec.",
        ),
    ] = "eagle-3",
    out: Out = Path("trained-drafter"),
    minutes: Minutes = None,
    steps: Steps = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Folder of texts and states that several runs share. Default: data in --out.",
        ),
    ] = None,
    texts: Annotated[
        int, typer.Option("--texts", help="Number of answers that the model writes to learn from.")
    ] = 4000,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Maximum number of tokens of an answer.")
    ] = 256,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=1, help="Number of tokens that it can draft.")
    ] = 8192,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            min=1,
            help="Tokens that it learns to draft at once: unrolled steps of EAGLE, heads of Medusa"
            " and Hydra, slots of a block. Default: the recipe's.",
        ),
    ] = None,
    batch: Batch = 2,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Peak learning rate. Default: the recipe's.")
    ] = None,
    head: Annotated[
        bool,
        typer.Option(
            "--head/--no-head",
            help="Write the rows of the model's head that it uses too, as other engines need them.",
        ),
    ] = True,
    dtype: options.Dtype = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Device of torch that writes the texts, computes the states and trains, such as"
            " cuda; for models of Llama's kind. Default: the engine on the CPU.",
        ),
    ] = None,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a drafter for a model, on answers to prompts that the model writes itself.

    Writing the texts and collecting the model's states come before the training. A run with the
    same --out is resumed; with more minutes, it is continued. The drafter is in the folder
    "drafter" of --out: use it with --draft and the decoder of its kind (eagle, medusa, hydra,
    blockwise, clover, chimera, falcon, dflash, parallelspec, longspec, eesd for early-exit,
    kangaroo).

    Example: anydecode train drafter --minutes 60 --threads 2 --out my-drafter --plot curve.svg
    """
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.drafter import DrafterOptions, DrafterRun

    minutes = _minutes(minutes, steps)
    settings = DrafterOptions(
        minutes,
        steps,
        recipe=recipe,
        texts=texts,
        tokens=tokens,
        vocabulary=vocabulary,
        depth=depth,
        batch=batch,
        rate=rate,
        seed=seed,
        has_head=head,
        device=device,
    )
    limit_threads(threads)
    run = DrafterRun(model, out, settings, dtype, data)
    with progress("drafter", 1.0, unit="percent") as bar:
        run.run(lambda stage, done, detail: bar.update(done, step=stage, detail=detail))
    if plot is not None:
        curve.draw_acceptance(run.log(), plot)
    if json:
        print_json({"path": str(run.drafter), **run.log()})
        return
    for name, result in run.results.items():
        depths = " ".join(f"{value:.2f}" for value in result["accepted_by_depth"])
        note(f"{name}: {result['tokens_per_pass']:.2f} tokens per pass, accepted by depth {depths}")
    print(run.drafter)


@app.command("adadec")
def train_adadec(
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            help="JSON lines with the fields prompt and canonical_solution, as of HumanEval.",
        ),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    json: options.Json = False,
) -> None:
    """Learn the entropy threshold of the decoder adadec for a model.

    Example: anydecode train adadec --data HumanEval.jsonl
    """
    from dataclasses import asdict

    from anydecode.api.llm import LLM
    from anydecode.training.entropy_threshold import learn_threshold
    from anydecode.training.pairs import read_solutions

    pairs = read_solutions(data)
    with LLM(model) as llm, progress("solutions", len(pairs)) as bar:
        bar.begin("reading")
        found = learn_threshold(llm, pairs, bar.update)
    if json:
        print_json(asdict(found))
        return
    note(f"{found.num_tokens} tokens, {found.share_above:.0%} at or above the threshold")
    note(f"the most probable token is right below it, wrong above: {found.accuracy:.1%}")
    print(f"adadec:threshold={found.threshold:.3f}")


@app.command("regression")
def train_regression(
    data: Annotated[
        Path, typer.Option("--data", help="JSON lines with the fields prompt and number.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model of the Llama family to adapt.")
    ] = options.DEFAULT_MODEL,
    out: Annotated[Path, typer.Option("--out", help="Output folder of the adapter.")] = Path(
        "numbers"
    ),
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder", help="The decoder that will use the adapter: format and range of numbers."
        ),
    ] = "regression",
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Steps on the digits of the known numbers.")
    ] = 200,
    reward_steps: Annotated[
        int,
        typer.Option(
            "--reward-steps", min=0, help="Steps on the errors of sampled numbers, after those."
        ),
    ] = 0,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, help="Sampled numbers per prompt in a step on errors."),
    ] = 8,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts per step.")] = 16,
    rate: Annotated[
        float, typer.Option("--rate", help="Learning rate of the steps on known digits.")
    ] = 1e-3,
    reward_rate: Annotated[
        float, typer.Option("--reward-rate", help="Learning rate of the steps on errors.")
    ] = 1e-4,
    expert: Annotated[
        float,
        typer.Option(
            "--expert", min=0, help="Weight of the best digits behind sampled ones in such a step."
        ),
    ] = 0.0,
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline",
            help="What the errors of samples are compared with: greedy, the most probable number"
            " (ReMax), or group, the other samples (GRPO).",
        ),
    ] = "greedy",
    divergence: Annotated[
        float,
        typer.Option(
            "--divergence", min=0, help="Weight of the divergence from the model before such steps."
        ),
    ] = 0.0,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a low-rank adapter with which the decoder regression predicts numbers.

    Example: anydecode train regression --data prices.jsonl --decoder regression:high=500
    """
    from dataclasses import asdict

    from anydecode.catalogue import build_as
    from anydecode.decoders.search.regression import Regression
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.pairs import read_numbers
    from anydecode.training.regression import NumberRecipe, train_numbers

    recipe = NumberRecipe(
        steps,
        reward_steps,
        samples,
        rank,
        batch,
        rate,
        reward_rate,
        expert,
        baseline,
        divergence,
        seed,
    )
    built = build_as(decoder, "the decoder regression", Regression)
    pairs = read_numbers(data)
    limit_threads(threads)
    with progress("steps", steps + reward_steps) as bar:
        errors = train_numbers(
            load_checkpoint(model),
            pairs,
            built,
            out,
            recipe,
            lambda step, loss: bar.update(step, detail=f"loss {loss:.3f}"),
            model,
        )
    if json:
        print_json({"path": str(out), **asdict(errors)})
        return
    note(f"mean absolute error without the adapter: {errors.before:.4g}")
    note(f"after the steps on known digits: {errors.supervised:.4g}, and after all steps:"
         f" {errors.rewarded:.4g}")  # fmt: skip
    print(out)


@app.command("trees")
def train_trees(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-trees"),
    minutes: Minutes = None,
    steps: Steps = None,
    prompts: PromptsFile = None,
    answers: Answers = 256,
    tokens: AnswerTokens = 256,
    fork: Annotated[str, typer.Option("--fork", help="Text of the fork token.")] = "\x0e",
    child: Annotated[str, typer.Option("--child", help="Text of the child token.")] = "\x0f",
    batch: Batch = 8,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a low-rank adapter that marks the details of lists and paragraphs, for the decoder
    apar, on the model's own answers. A run with the same --out is resumed.

    Example: anydecode train trees --prompts lists.txt --minutes 60 --out my-trees
    """
    from anydecode.decoders.search.apar import mark_tokens
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.nested import own_answers
    from anydecode.training.pair_run import PairRecipe, PairRun
    from anydecode.training.trees import tree_texts

    recipe = PairRecipe(
        _minutes(minutes, steps), steps, rank=rank, batch=batch, rate=rate, seed=seed
    )
    lines = [] if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
    limit_threads(threads)
    checkpoint = load_checkpoint(model)
    tokenizer = _tokenizer_with_end(checkpoint)
    marks = mark_tokens(tokenizer, (fork, child))

    def texts() -> list[list[Pair]]:
        turns = [line for line in lines if line.strip()]
        return tree_texts(
            own_answers(checkpoint, answers, tokens, seed, turns),
            tokenizer.decode,
            lambda text: tokenizer.encode(text, special=False),
            marks,
            tokenizer.eos_ids,
        )

    run = _trained(lambda: PairRun(checkpoint, out, recipe, texts, model), "trees")
    _print_losses(run, plot, json)


@app.command("rewriter")
def train_rewriter(
    prompts: Annotated[
        Path,
        typer.Option("--prompts", metavar="FILE", help="File with one instruction per line."),
    ],
    model: LlamaModel = options.DEFAULT_MODEL,
    target: Annotated[
        str | None,
        typer.Option("--target", help="Model that answers the instructions. Default: --model."),
    ] = None,
    out: Out = Path("trained-rewriter"),
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder", help="The search that finds rewritings: its iterations and its reward."
        ),
    ] = "p-aligner",
    tokens: AnswerTokens = 96,
    minutes: Minutes = None,
    steps: Steps = None,
    preferring: Annotated[
        float,
        typer.Option(
            "--preferring", min=0, max=1, help="Share of the training that learns preferences."
        ),
    ] = 0.3,
    beta: Annotated[
        float, typer.Option("--beta", help="How little preferences may change the model.")
    ] = 0.1,
    rank: Annotated[
        int, typer.Option("--rank", min=1, help="Rank of the model's adapter, which is merged.")
    ] = 16,
    batch: Batch = 8,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model that rewrites instructions at once, for the decoder p-aligner with
    trained=true, on rewritings that searches find. A run with the same --out is resumed.

    Example: anydecode train rewriter --prompts instructions.txt --minutes 60 --out my-rewriter
    """
    from anydecode.api.llm import LLM
    from anydecode.catalogue import build_as
    from anydecode.decoders.search.p_aligner import PAligner
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.pairs import read_texts
    from anydecode.training.rewriter import (
        RewriterRecipe,
        RewriterRun,
        Rewriting,
        search_rewritings,
    )

    recipe = RewriterRecipe(
        _minutes(minutes, steps),
        steps,
        preferring=preferring,
        beta=beta,
        rank=rank,
        batch=batch,
        rate=rate,
        seed=seed,
    )
    method = build_as(decoder, "the decoder p-aligner", PAligner)
    instructions = read_texts(prompts)
    limit_threads(threads)
    checkpoint = load_checkpoint(model)

    def rewritings() -> list[Rewriting]:
        with LLM(target or model, draft="none", threads=threads or None) as llm:
            return search_rewritings(llm, instructions, method, max_tokens=tokens, seed=seed)

    run = _trained(lambda: RewriterRun(checkpoint, out, recipe, rewritings), "rewriter")
    if plot is not None:
        curve.draw_held_out(run.log(), plot)
    if json:
        print_json({"path": str(out), **run.log()})
        return
    first, *_, last = [entry["held_out"] for entry in run.history if "held_out" in entry]
    for name in last:
        note(f"{name} of held-out rewritings: {first[name]:.3f} -> {last[name]:.3f}")
    print(out)


@app.command("dglm")
def train_dglm(
    encoder: Encoder,
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help="File with one text per line.")
    ],
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-dglm"),
    minutes: Minutes = None,
    steps: Steps = None,
    cuts: Annotated[
        int,
        typer.Option("--cuts", min=1, help="How many prompts and continuations a text becomes."),
    ] = 4,
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="Maximum number of tokens of a text.")
    ] = 96,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Positions of the soft prompt.")] = 8,
    width: Annotated[int, typer.Option("--width", min=1, help="Width of the networks.")] = 512,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks of each network.")] = 3,
    rank: Annotated[
        int, typer.Option("--rank", min=1, help="Rank of the model's adapter, which is merged.")
    ] = 16,
    batch: Batch = 16,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model that follows proposed embeddings, and the diffusion model that proposes them,
    for the decoder dglm. A run with the same --out is resumed.

    Example: anydecode train dglm --encoder my-encoder --data texts.txt --minutes 60 --out my-dglm
    """
    from anydecode.api.llm import LLM
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.pairs import read_texts
    from anydecode.training.sentence_diffusion import SentenceRecipe, SentenceRun

    recipe = SentenceRecipe(
        _minutes(minutes, steps),
        steps,
        cuts=cuts,
        tokens=tokens,
        rows=rows,
        width=width,
        blocks=blocks,
        rank=rank,
        batch=batch,
        rate=rate,
        seed=seed,
    )
    texts = read_texts(data)
    limit_threads(threads)
    checkpoint = load_checkpoint(model)
    with LLM(encoder, draft="none") as reading:
        run = _trained(lambda: SentenceRun(checkpoint, reading, out, recipe, texts), "dglm")
    if plot is not None:
        curve.draw_held_out(run.log(), plot)
    if json:
        print_json({"path": str(out), **run.log()})
        return
    first, *_, last = [entry["held_out"] for entry in run.history if "held_out" in entry]
    for name in last:
        note(f"loss of held-out {name}: {first[name]:.3f} -> {last[name]:.3f}")
    print(out)


@app.command("classifier")
def train_classifier(
    encoder: Encoder,
    data: Annotated[
        Path,
        typer.Option("--data", metavar="FILE", help="JSON lines with the fields text and label."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Output file.")] = Path(
        "classifier.safetensors"
    ),
    penalty: Annotated[
        float, typer.Option("--penalty", min=0, help="Penalty of large weights.")
    ] = 1e-3,
    seed: Seed = 0,
    json: options.Json = False,
) -> None:
    """Train a classifier of embeddings, which leads the decoder dglm.

    Example: anydecode train classifier --encoder my-encoder --data labels.jsonl
    """
    from anydecode.api.llm import LLM
    from anydecode.training.embedding_classifier import fit_classifier
    from anydecode.training.pairs import read_labels

    pairs = read_labels(data)
    with LLM(encoder, draft="none") as reading:
        found = fit_classifier(reading, pairs, penalty=penalty, seed=seed)
    found.classifier.save(out)
    if json:
        print_json({"path": str(out), "texts": found.num_texts, "accuracy": found.accuracy})
        return
    note(f"{found.num_texts} texts; right labels of held-out ones: {found.accuracy:.1%}")
    print(out)


@app.command("interleaved")
def train_interleaved(
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            help="JSON lines with the fields prompt and chunks: pairs of a part of the source and"
            " what is written after it.",
        ),
    ],
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-interleaved"),
    minutes: Minutes = None,
    steps: Steps = None,
    end_of_read: Annotated[
        str, typer.Option("--end-of-read", help="Text of the token behind parts of the source.")
    ] = "<|end-of-read|>",
    end_of_write: Annotated[
        str, typer.Option("--end-of-write", help="Text of the token behind what is written.")
    ] = "<|end-of-write|>",
    batch: Batch = 8,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapter.")] = 16,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a low-rank adapter that decides when to read and when to write, for the decoder
    simul-mt with policy=trained. A run with the same --out is resumed.

    Example: anydecode train interleaved --data chunks.jsonl --minutes 60 --out my-translator
    """
    from anydecode.decoders.search.simul_mt import SimulMt
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.interleaved import interleaved_row, read_interleaved
    from anydecode.training.pair_run import PairRecipe, PairRun

    recipe = PairRecipe(
        _minutes(minutes, steps), steps, rank=rank, batch=batch, rate=rate, seed=seed
    )
    translations = read_interleaved(data)
    limit_threads(threads)
    checkpoint = load_checkpoint(model)
    tokenizer = _tokenizer_with_end(checkpoint)
    decoder = SimulMt("trained", end_of_read=end_of_read, end_of_write=end_of_write)
    [read], [write] = decoder.mark_tokens(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    def texts() -> list[list[Pair]]:
        return [
            [interleaved_row(one, encode, tokenizer.encode(one.prompt), (read, write))]
            for one in translations
        ]

    run = _trained(lambda: PairRun(checkpoint, out, recipe, texts, model), "translations")
    _print_losses(run, plot, json)


def _tokenizer_with_end(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model that is trained on texts that end."""
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or not tokenizer.eos_ids:
        raise CheckpointError(f"{checkpoint.name}: training needs a tokenizer with an end of text")
    return tokenizer


def _print_losses(run: PairRun, plot: Path | None, json: bool) -> None:
    """Print the results of a run on pairs, and draw its curve."""
    from anydecode.training import curve

    if plot is not None:
        curve.draw_held_out(run.log(), plot)
    if json:
        print_json({"path": str(run.folder), **run.log()})
        return
    first, *_, last = run.losses()
    note(f"loss of held-out texts: {first:.3f} -> {last:.3f}")
    print(run.folder)


@app.command("autodeco")
def train_autodeco_heads(
    out: Annotated[Path, typer.Option("--out", help="Output file.")] = Path("autodeco.safetensors"),
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File with one prompt per line. Default: the model generates them.",
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", min=2, help="Number of prompts that the model generates.")
    ] = 160,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", min=1, help="Answers sampled per prompt; the most probable one is kept."
        ),
    ] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")] = 64,
    width: Annotated[int, typer.Option("--width", min=1, help="Hidden width of the heads.")] = 64,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Training epochs.")] = 12,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.")] = 5e-4,
    weighted: Annotated[
        bool,
        typer.Option(
            "--weighted",
            help="Weight tokens by their probability and drop most easy ones, as the paper does.",
        ),
    ] = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train heads that predict temperature and top-p for every token, on the model's own text.

    Example: anydecode train autodeco --count 40 --out my-heads.safetensors
    """
    from dataclasses import asdict

    from anydecode.training.autodeco import AutoDecoRecipe, train_autodeco
    from anydecode.training.diffusion import limit_threads

    limit_threads(threads)
    recipe = AutoDecoRecipe(
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
    with progress("epochs", epochs) as bar:
        bar.begin("own text")
        learner, gain = train_autodeco(
            llm,
            recipe,
            [line for line in lines if line.strip()],
            lambda done, loss: bar.update(done + 1, step="heads", detail=f"loss {loss:.3f}"),
        )
    learner.heads().save(out)
    if json:
        print_json({"path": str(out), **asdict(gain)})
        return
    note(gain.summary())
    print(out)

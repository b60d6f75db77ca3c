"""`anydecode train depth`: recipes that train what leaves or skips layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.cli.train.app import (
    Answers,
    AnswerTokens,
    Batch,
    LlamaModel,
    Minutes,
    Out,
    PromptsFile,
    Rate,
    Seed,
    Steps,
    Threads,
    app,
    held_out_lines,
    minutes_or_default,
    positive,
    report,
    trained,
)
from anydecode.cli.train.recipes import RecipeGroup
from anydecode.progress import note, progress
from anydecode.report import PlotFile

if TYPE_CHECKING:
    from anydecode.training.exit_run import ExitRecipe, ExitRun


class DepthRecipes(RecipeGroup):
    """The recipes of `anydecode train depth`."""

    default_recipe = "layerskip"


recipes = typer.Typer(cls=DepthRecipes, rich_markup_mode=None)
app.add_typer(recipes, name="depth")


@recipes.callback()
def train_depth() -> None:
    """Train what the decoders need that leave or skip layers. A run with the same --out is resumed.
    The adapters of kangaroo and eesd are recipes of `anydecode train drafter`.

    Example: anydecode train depth --recipe tide --label token --out my-routers --plot curve.svg
    """


@recipes.command("layerskip")
def train_layerskip(
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

    Example: anydecode train depth --recipe layerskip --minutes 60 --out my-model --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.layerskip import LayerSkipRecipe, LayerSkipRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(lambda: LayerSkipRun(load_checkpoint(model), out, settings), "model", threads)
    first, *_, last = run.agreements()
    layer = max(1, run.num_layers // 3)
    report(
        run,
        run.model_folder,
        [
            f"after {layer} of {run.num_layers} layers the token of the last one:"
            f" {first[layer - 1]:.3f} -> {last[layer - 1]:.3f} of held-out answers"
        ],
        curve.draw_agreement,
        plot,
        json,
    )


@recipes.command("skipdecode")
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

    Example: anydecode train depth --recipe skipdecode --minutes 60 --tokens 128 --out my-model
    --plot curve.svg
    """
    from anydecode.catalogue import build_as
    from anydecode.decoders.depth.skipdecode import SkipDecode
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.schedule import ScheduleRecipe, ScheduleRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(
        lambda: ScheduleRun(load_checkpoint(model), out, recipe, built), "schedule", threads
    )
    first, *_, last = run.held_out_losses()
    report(
        run,
        run.model_folder,
        [f"held-out answers on the schedule: {first:.3f} -> {last:.3f} nats per token"],
        lambda log, file: curve.draw_held_out(
            log, file, "Training on a schedule of layers", "nats per token"
        ),
        plot,
        json,
    )


@recipes.command("ceed")
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

    Example: anydecode train depth --recipe ceed --minutes 60 --out my-model
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training.block_consistency import BlockRecipe, BlockRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(lambda: BlockRun(load_checkpoint(model), out, recipe), "blocks", threads)
    if json:
        print_json({"path": str(run.model_folder), **run.log()})
        return
    first, *_, last = run.results()
    for name in first:
        note(f"{name} in held-out blocks: {first[name]:.3f} -> {last[name]:.3f}")
    print(run.model_folder)


@recipes.command("specbound")
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

    Example: anydecode train depth --recipe specbound --minutes 60 --out my-heads --plot curve.svg
    """
    from anydecode.catalogue import build_as
    from anydecode.decoders.depth.specbound import SpecBound
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.exit_heads import HeadRecipe, HeadRun

    minutes = minutes_or_default(minutes, steps)
    recipe = HeadRecipe(minutes, steps, answers=answers, batch=batch, rate=rate, seed=seed)
    exits = build_as(decoder, "the decoder specbound", SpecBound).exits
    run = trained(lambda: HeadRun(load_checkpoint(model), out, recipe, exits), "heads", threads)
    first, *_, last = run.agreements()
    report(
        run,
        run.file,
        [
            "tokens of held-out answers that each exit predicts as the last layer does:",
            *(
                f"after {exit} layers {before:.3f} -> {after:.3f}"
                for exit, before, after in zip(run.exits, first, last, strict=True)
            ),
        ],
        curve.draw_agreement,
        plot,
        json,
    )


@recipes.command("m2r2")
def train_accelerators(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-accelerators"),
    minutes: Minutes = None,
    steps: Steps = None,
    first: Annotated[
        int, typer.Option("--first", min=1, help="The first layer that has an adapter, from 0.")
    ] = 1,
    exit: Annotated[
        int | None,
        typer.Option(
            "--exit", help="Number of layers of a draft. Default: an eighth of the model's."
        ),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 16,
    answers: Answers = 256,
    batch: Batch = 4,
    rate: Rate = 1e-3,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the accelerators with which m2r2 drafts, on the model's own answers. The model stays as
    it is. A run with the same --out is resumed. They are in the file "accelerators.safetensors" of
    --out.

    Example: anydecode train depth --recipe m2r2 --minutes 60 --out my-accelerators --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.accelerators import AcceleratorRecipe, AcceleratorRun

    recipe = AcceleratorRecipe(
        minutes_or_default(minutes, steps),
        steps,
        answers=answers,
        batch=batch,
        rate=rate,
        first=first,
        exit=exit,
        rank=rank,
        seed=seed,
    )
    run = trained(
        lambda: AcceleratorRun(load_checkpoint(model), out, recipe), "accelerators", threads
    )
    (before, own), *_, (after, _) = run.agreements()
    report(
        run,
        run.file,
        [
            "tokens of held-out answers that are the last layer's:"
            f" {before:.3f} -> {after:.3f} by the accelerated stream, {own:.3f} by the model's own"
            f" after {run.layers[-1] + 1} layers"
        ],
        lambda log, file: curve.draw_held_out(
            log, file, "Training of accelerators", "nats per token"
        ),
        plot,
        json,
    )


ExitSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Number of steps, each over all rows. Default: 100, unless --minutes is given.",
    ),
]


ExitMinutes = Annotated[
    float | None,
    typer.Option(
        "--minutes", help="Training time in minutes, instead of --steps.", callback=positive
    ),
]


@recipes.command("tide")
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
    body: Annotated[
        str,
        typer.Option(
            "--body",
            help="What a router is: mlp (one hidden layer), or in front of it block (the"
            " feed-forward block of a transformer) or mamba (a block of Mamba, which reads one"
            " token of an answer after the other).",
        ),
    ] = "mlp",
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

    Example: anydecode train depth --recipe tide --label token --answers 16 --out my-routers
    --plot curve.svg
    """
    from anydecode.training.exit_routers import RouterRecipe, RouterRun

    recipe = RouterRecipe(
        minutes=minutes,
        steps=100 if minutes is None and steps is None else steps,
        label=label,  # type: ignore[arg-type]
        top_k=top_k,
        interval=interval,
        body=body,  # type: ignore[arg-type]
        answers=answers,
        tokens=tokens,
        rate=rate,
        seed=seed,
    )
    _train_exits(RouterRun, recipe, model, None, out, prompts, threads, plot, json)


@recipes.command("specee")
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

    Example: anydecode train depth --recipe specee --answers 16 --out my-predictors --plot curve.svg
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


@recipes.command("first-router")
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

    Example: anydecode train depth --recipe first-router --steps 200 --penalty 0.05 --out my-layers
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.layer_routers import LayerRouterRecipe, LayerRouterRun

    recipe = LayerRouterRecipe(
        minutes=minutes_or_default(minutes, steps),
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
    run = trained(lambda: LayerRouterRun(load_checkpoint(model), out, recipe), "routers", threads)
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


@recipes.command("first-router-adapter")
def train_layer_adapter(
    routers: Annotated[
        Path, typer.Option("--routers", help="The file of the recipe first-router.")
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

    Example: anydecode train depth --recipe first-router-adapter
    --routers my-layers/layer_routers.safetensors
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.layer_adapter import LayerAdapterRecipe, LayerAdapterRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(
        lambda: LayerAdapterRun(load_checkpoint(model), out, recipe, routers), "adapter", threads
    )
    first, *_, last = run.held_out_losses()
    report(
        run,
        run.model_folder,
        [f"held-out answers without layers: {first:.3f} -> {last:.3f} nats per token"],
        lambda log, file: curve.draw_held_out(
            log, file, "Training with routed layers", "nats per token"
        ),
        plot,
        json,
    )


@recipes.command("duo-llm-mlps")
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

    Example: anydecode train depth --recipe duo-llm-mlps --steps 200 --out my-mlps
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.small_mlps import SmallMlpRecipe, SmallMlpRun

    recipe = SmallMlpRecipe(
        minutes_or_default(minutes, steps),
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        width=width,
        layers=layers,
        seed=seed,
    )
    run = trained(lambda: SmallMlpRun(load_checkpoint(model), out, recipe), "small MLPs", threads)
    report(
        run,
        run.path,
        held_out_lines(run, "held-out answers, {name}", " nats per token"),
        lambda log, file: curve.draw_held_out(
            log, file, "Training of small MLPs", "nats per token"
        ),
        plot,
        json,
    )


@recipes.command("duo-llm")
def train_mlp_routers(
    out: Out = Path("trained-mlp-routers"),
    model: LlamaModel = options.DEFAULT_MODEL,
    small: Annotated[
        Path | None,
        typer.Option(
            "--small", help="The file of the recipe duo-llm-mlps, if these are the other choice."
        ),
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    share: Annotated[
        float,
        typer.Option(
            "--share", min=0.0, max=1.0, help="The share of MLPs that a token should run."
        ),
    ] = 0.5,
    penalty: Annotated[
        float, typer.Option("--penalty", min=0.0, help="Nats per squared difference to it.")
    ] = 10.0,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="Layers in the middle that have a router.")
    ] = 8,
    answers: Answers = 64,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 1e-2,
    seed: Seed = 0,
    threads: Threads = 0,
    plot: PlotFile = None,
    json: options.Json = False,
) -> None:
    """Train the routers that duo-llm compares with the best choice of MLPs, on the model's own
    answers. A run with the same --out is resumed.

    Example: anydecode train depth --recipe duo-llm --steps 200 --share 0.25 --out my-routers
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.small_mlps import SmallMlps
    from anydecode.training import curve
    from anydecode.training.mlp_routers import MlpRouterRecipe, MlpRouterRun

    recipe = MlpRouterRecipe(
        minutes_or_default(minutes, steps),
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        share=share,
        penalty=penalty,
        layers=layers,
        seed=seed,
    )
    mlps = None if small is None else SmallMlps.load(small)
    run = trained(
        lambda: MlpRouterRun(load_checkpoint(model), out, recipe, mlps), "routers", threads
    )
    results = run.results()
    runs = results["runs"]
    report(
        run,
        run.path,
        [
            f"tokens of held-out answers run {sum(runs):.1f} of {len(runs)} MLPs, with"
            f" {results['held_out']['MLPs routed']:.3f} nats per token",
            "by layer: " + ", ".join(f"{one:.0%}" for one in runs),
        ],
        lambda log, file: curve.draw_held_out(
            log, file, "Training of MLP routers", "nats per token"
        ),
        plot,
        json,
    )


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

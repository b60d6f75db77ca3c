"""Commands that train draft models, drafters and masks."""

from __future__ import annotations

from functools import partial
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
    Rate,
    Seed,
    Steps,
    Threads,
    app,
    held_out_lines,
    minutes_or_default,
    positive,
    report,
    resumable,
    shares_line,
    trained,
    usable_folder,
)
from anydecode.errors import InvalidRequestError
from anydecode.progress import progress
from anydecode.report import PlotFile

if TYPE_CHECKING:
    pass


@app.command("nested")
def train_nested_draft(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("nested"),
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="Number of first layers. Default: half of them.")
    ] = 0,
    exits: Annotated[
        str, typer.Option("--exits", help="Exits as fractions of these layers, as of s2d.")
    ] = "0.5-0.75",
    minutes: Minutes = None,
    steps: Steps = None,
    answers: Answers = 256,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 2e-4,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the first layers of a model as a draft model that predicts tokens at several exits
    (sorted fine-tuning), for the decoder s2d. A run with the same --out, which is the draft model's
    folder too, is resumed.

    Example: anydecode train nested --layers 12 --steps 500 --out my-nested --plot curve.svg
    """
    from anydecode.decoders.speculative.s2d import exit_fractions
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.nested import NestedRecipe, NestedRun

    settings = NestedRecipe(
        minutes_or_default(minutes, steps),
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        seed=seed,
        layers=layers,
        exits=exit_fractions(exits),
    )
    run = trained(lambda: NestedRun(load_checkpoint(model), out, settings), "draft model", threads)
    report(
        run,
        out,
        held_out_lines(run, "nats per token of held-out answers behind {name}"),
        partial(curve.draw_held_out, title="Training of a draft model", unit="nats per token"),
        plot,
        json,
    )


@app.command("draft-model")
def train_draft_model(
    model: LlamaModel = options.DEFAULT_MODEL,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="distillspec or fastdraft, with parameters such as"
            " distillspec:divergence=tv,on_policy=0.5.",
        ),
    ] = "distillspec",
    out: Out = Path("trained-draft-model"),
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="Draft model to begin with, of the Llama family. Default: the recipe's."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            help="File with a text per line, or a prompt, a tab and an answer: what fastdraft"
            " learns first, or the fixed answers of distillspec:data=fixed.",
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            "--code",
            metavar="FILE",
            help="File of code, which fastdraft learns beside the texts in the second half of its"
            " pre-training.",
        ),
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    answers: Answers = 256,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 5e-4,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a small language model that drafts for a model, for the decoder speculative-sampling
    and others with a draft model. Held-out prompts are decoded with it before and after. A run with
    the same --out is resumed. The draft model is in the folder "draft" of --out.

    Example: anydecode train draft-model --recipe distillspec:divergence=jsd --out my-draft
    """
    from anydecode import catalogue
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.draft_model import DraftModelRun, DraftOptions
    from anydecode.training.recipes.draft_recipe import DraftRecipe

    settings = DraftOptions(
        minutes_or_default(minutes, steps),
        steps,
        answers=answers,
        tokens=tokens,
        batch=batch,
        rate=rate,
        seed=seed,
        draft=catalogue.build_as(recipe, "a recipe of a draft model", DraftRecipe),
    )

    def open_run() -> DraftModelRun:
        base = None if draft is None else load_checkpoint(draft)
        run = DraftModelRun(load_checkpoint(model), out, settings, base, texts, code=code)
        if not run.step:
            run.measure()
        return run

    run = trained(open_run, "draft model", threads)
    run.measure()
    lines = []
    for name, before in run.results["before"].items():
        after = run.results["after"][name]
        lines.append(
            f"{name}: {before['tokens_per_pass']:.2f} -> {after['tokens_per_pass']:.2f} tokens per"
            " pass on held-out prompts"
        )
        lines.append(shares_line("accepted by depth:", after["accepted_by_depth"]))
    report(run, run.draft_folder, lines, curve.draw_draft_model, plot, json)


@app.command("scaling")
def train_scaling(
    model: LlamaModel = options.DEFAULT_MODEL,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", help="scylla, with parameters such as scylla:layers=1-2-4,planned=1000000."
        ),
    ] = "scylla",
    out: Annotated[
        Path, typer.Option("--out", help="New output folder, or one of a study to resume.")
    ] = Path("scaling"),
    answers: Answers = 256,
    tokens: AnswerTokens = 64,
    batch: Batch = 4,
    rate: Rate = 5e-4,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train draft models of several sizes on several numbers of tokens, fit log-linear laws to how
    many drafts are accepted and to the throughput, and recommend a draft model. A study with the
    same --out is resumed; a finished one is printed again.

    Example: anydecode train scaling --recipe scylla:layers=1-2-4 --out my-study --plot laws.svg
    """
    from anydecode import catalogue
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.draft_model import DraftOptions
    from anydecode.training.recipes.scylla import ScalingRecipe
    from anydecode.training.scaling import ScalingStudy

    chosen = catalogue.build_as(recipe, "a study of draft models", ScalingRecipe)
    settings = DraftOptions(
        steps=1, answers=answers, tokens=tokens, batch=batch, rate=rate, seed=seed
    )
    limit_threads(threads)
    study = ScalingStudy(load_checkpoint(model), out, chosen, settings)
    with progress("study", 1.0, unit="percent") as bar:
        study.run(lambda done, what: bar.update(done, step=what))
    results = study.results()
    if plot is not None:
        curve.draw_scaling(results, plot)
    if json:
        print_json(results)
        return
    for name, law in study.laws().items():
        print(f"{name} = {law}")
    for one in results["recommended"]:
        size = f"a draft model of {one['layers']} layers" if one["layers"] else "no draft model"
        print(
            f"batch {one['batch']}: {size}, {one['tokens_per_second']:.1f} tokens per second and"
            f" {one['accepted']:.2f} tokens per pass predicted"
        )


@app.command("masks")
def train_masks(
    model: LlamaModel = options.DEFAULT_MODEL,
    out: Out = Path("trained-masks"),
    minutes: Minutes = None,
    steps: Steps = None,
    masks: Annotated[
        int | None,
        typer.Option(
            "--masks",
            min=1,
            help="Number of masks, which predict a token each. Default: 2; with --units 3, as many"
            " as lud has by default.",
        ),
    ] = None,
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
    units: Annotated[
        float | None,
        typer.Option(
            "--units",
            metavar="<probability>",
            help="Train on lexical units (LUD), of up to --masks + 1 tokens: those behind the first"
            " have at least this probability. Default: groups behind any tokens.",
        ),
    ] = None,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train a model to predict several tokens at mask tokens behind its text, for the decoders
    space and mars, or with --units lexical units, for lud. A run with the same --out is resumed.
    The model is in the folder "model" of --out.

    Example: anydecode train masks --minutes 60 --out my-model --plot curve.svg
    """
    from anydecode.models.loading import load_checkpoint
    from anydecode.training import curve
    from anydecode.training.masks import MaskRecipe, MaskRun, UnitRecipe, UnitRun

    recipe = MaskRecipe(
        minutes_or_default(minutes, steps),
        steps,
        masks=masks or (2 if units is None else 3),
        groups=groups,
        answers=answers,
        batch=batch,
        rank=rank,
        rate=rate,
        seed=seed,
    )
    made: type[MaskRun] = MaskRun
    if units is not None:
        made, recipe = UnitRun, UnitRecipe(**vars(recipe), confidence=units)
    run = trained(lambda: made(load_checkpoint(model), out, recipe, mask), "masks", threads)
    (text, _), *_, (last, shares) = run.shares()
    report(
        run,
        run.model_folder,
        [
            f"tokens of held-out answers that the text's rows predict: {text:.3f} -> {last:.3f}",
            shares_line("and each mask:", shares),
        ],
        curve.draw_acceptance,
        plot,
        json,
    )


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
    from anydecode.training.future_masks import FutureRecipe, FutureRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(lambda: FutureRun(load_checkpoint(model), out, recipe), "masks", threads)
    *_, (_, shares) = run.shares()
    report(
        run,
        run.parts_folder,
        [shares_line("tokens of held-out answers that each mask predicts:", shares)],
        curve.draw_acceptance,
        plot,
        json,
    )


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
    from anydecode.training.hidden_transfer import TransferRecipe, TransferRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(lambda: TransferRun(load_checkpoint(model), out, recipe), "maps", threads)
    *_, (_, shares) = run.shares()
    report(
        run,
        run.file,
        [shares_line("tokens of held-out answers that each pseudo state predicts:", shares)],
        curve.draw_acceptance,
        plot,
        json,
    )


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
    from anydecode.training.masks import PromptRecipe, PromptRun

    minutes = minutes_or_default(minutes, steps)
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
    run = trained(lambda: PromptRun(load_checkpoint(model), out, recipe), "prompts", threads)
    *_, (_, shares) = run.shares()
    report(
        run,
        run.file,
        [shares_line("tokens of held-out answers that each prompt token predicts:", shares)],
        curve.draw_acceptance,
        plot,
        json,
    )


@app.command("drafter")
def train_drafter(
    model: Annotated[str, typer.Option("--model", "-m", help="Model to draft for.")] = (
        options.DEFAULT_MODEL
    ),
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="eagle-3, eagle, medusa, hydra, hydra++, blockwise, clover, clover-2, chimera,"
            " falcon, dflash, dspark, p-eagle, parallelspec, early-exit, kangaroo or longspec.",
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
            callback=usable_folder,
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
        float | None,
        typer.Option(
            "--rate", help="Peak learning rate. Default: the recipe's.", callback=positive
        ),
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
    same --out is resumed, also after Ctrl-C; with more minutes, it is continued. The drafter is in
    the folder "drafter" of --out: use it with --draft and the decoder of its kind, which is
    printed.

    Medusa, hydra and blockwise take models of all kinds with one head, the others dense ones whose
    last layer is that of Llama; eagle-3, dflash, dspark and p-eagle read three layers of at least
    6.

    Example: anydecode train drafter --minutes 60 --threads 2 --out my-drafter --plot curve.svg
    """
    from anydecode.training import curve
    from anydecode.training.diffusion import limit_threads
    from anydecode.training.drafter import DrafterOptions, DrafterRun

    minutes = minutes_or_default(minutes, steps)
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
    with resumable(out), progress("drafter", 1.0, unit="percent") as bar:

        def show(stage: str, done: float, detail: str) -> None:
            if stage != bar.name:
                bar.restart(stage, done)
            bar.update(done, detail=detail)

        run.run(show)
    lines = [f"drafts with --draft {run.drafter} --decoder {run.recipe.key}"]
    for name, result in run.results.items():
        depths = " ".join(f"{value:.2f}" for value in result["accepted_by_depth"])
        lines.append(
            f"{name}: {result['tokens_per_pass']:.2f} tokens per pass, accepted by depth {depths}"
        )
    report(run, run.drafter, lines, curve.draw_acceptance, plot, json)


@app.command("judge")
def train_judge(
    draft: Annotated[
        str, typer.Option("--draft", help="Draft model, whose tokens the judge learns to accept.")
    ],
    model: options.Model = options.DEFAULT_MODEL,
    out: Out = Path("trained-judge"),
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="JSON lines with the fields prompt and answer (empty if it is not known)."
            " Default: small problems in words.",
        ),
    ] = None,
    marked: Annotated[
        Path | None,
        typer.Option(
            "--marked",
            metavar="FILE",
            help="Instead of --data, JSON lines with the fields prompt, answer and mistakes: a list"
            " of [first character, end] of the answer, empty if it is right.",
        ),
    ] = None,
    states: Annotated[
        str,
        typer.Option(
            "--states",
            help='Whose states the judge reads: "target", or "both", which costs one more pass of'
            " the draft model per round.",
        ),
    ] = "target",
    answer: Annotated[
        str,
        typer.Option("--answer", help="The result of an answer: last-number or last-line."),
    ] = "last-number",
    questions: Annotated[
        int,
        typer.Option(
            "--questions", min=4, max=65536, help="Number of questions; a quarter is held out."
        ),
    ] = 256,
    tokens: AnswerTokens = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Questions per step.")] = 8,
    precision: Annotated[
        float,
        typer.Option("--precision", help="Share of right drafts among held-out accepted ones."),
    ] = 0.97,
    size: Annotated[int, typer.Option("--size", min=1, help="Drafts per round of the test.")] = 25,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the judge with which the decoder judge accepts drafts that do not change the result of
    an answer. Labels come from a search in the model's own answers, or from answers whose mistakes
    are marked. A run with the same --out is resumed. The judge is in the file "judge.safetensors"
    of --out, for --decoder judge:head=FILE with the same --draft.

    Example: anydecode train judge --draft my-nested --out my-judge --plot curve.svg
    """
    from random import Random

    from anydecode.api.llm import LLM
    from anydecode.rewards.answers import build
    from anydecode.training import curve
    from anydecode.training.judge import (
        JudgeRecipe,
        JudgeRun,
        MarkedAnswer,
        Question,
        own_questions,
    )
    from anydecode.training.pairs import read_marked, read_questions

    recipe, result = JudgeRecipe(tokens, batch, precision, size, states), build(answer)
    asked: list[Question | MarkedAnswer] = []
    if data is not None and marked is not None:
        raise InvalidRequestError("--data and --marked were given; give one of them")
    if data is not None:
        asked += read_questions(data)
    elif marked is not None:
        asked += [MarkedAnswer(*one) for one in read_marked(marked)]
    else:
        asked += own_questions(questions, seed)
    if data or marked:
        Random(seed).shuffle(asked)
    with LLM(model, draft=draft, threads=threads or None, drafting="fixed") as llm:
        run = trained(
            lambda: JudgeRun(llm, out, recipe, asked[:questions], result), "labels", threads
        )
    found = run.tested
    lines = [
        f"held-out drafts in place of the model's tokens: {found['labels']},"
        f" {found['right']:.1%} right; the judge accepts {found['accepted']:.1%},"
        f" {found['precision']:.1%} of these right",
    ]
    for name in ("standard", "judge"):
        one = found[name]
        right = "" if one["right"] is None else f", {one['right']:.1%} right"
        lines.append(
            f"{name}: {one['tokens_per_pass']:.2f} tokens per pass, {one['same']:.1%} with the same"
            f" result{right}"
        )
    report(
        run,
        run.path,
        lines,
        lambda log, file: curve.draw_held_out(log, file, "Training of a judge", "nats per label"),
        plot,
        json,
    )


@app.command("acceptance-head")
def train_acceptance_head(
    draft: Annotated[
        str, typer.Option("--draft", help="Draft model or drafter, beside which the head is put.")
    ],
    model: options.Model = options.DEFAULT_MODEL,
    out: Out = Path("acceptance-head"),
    minutes: Minutes = None,
    steps: Steps = None,
    answers: Answers = 64,
    tokens: AnswerTokens = 64,
    size: Annotated[int, typer.Option("--size", min=2, help="Drafts per round.")] = 8,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Temperature of the answers.")
    ] = 1.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Drafts per step.")] = 64,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.", callback=positive)] = 5e-4,
    plot: PlotFile = None,
    seed: Seed = 0,
    threads: Threads = 0,
    json: options.Json = False,
) -> None:
    """Train the head with which the decoder specdec++ stops drafting: from a draft model's states,
    it predicts whether the model accepts the draft. It learns from drafts in the model's own
    answers. A run with the same --out is resumed. The head is in "acceptance_head.safetensors" of
    --out, and of the folder that --draft names, if it is one: --decoder specdec++ with the same
    --draft and model uses it.

    Example: anydecode train acceptance-head --draft my-drafter --steps 500 --plot curve.svg
    """
    from anydecode.api.llm import LLM
    from anydecode.models.acceptance_head import FILE_NAME
    from anydecode.training import curve
    from anydecode.training.acceptance_head import AcceptanceHeadRun, HeadRecipe
    from anydecode.training.own_answers import prompts_to_answer

    recipe = HeadRecipe(
        minutes=minutes_or_default(minutes, steps),
        steps=steps,
        tokens=tokens,
        size=size,
        temperature=temperature,
        batch=batch,
        rate=rate,
        seed=seed,
    )
    with LLM(model, draft=draft, threads=threads or None, drafting="fixed") as llm:
        run = trained(
            lambda: AcceptanceHeadRun(llm, out, recipe, prompts_to_answer(llm, answers, seed)),
            "steps",
            threads,
        )
    path = run.path
    if Path(draft).is_dir():
        path = Path(draft) / FILE_NAME
        run.weights.save(path)
    lines = held_out_lines(run, "held-out drafts, {name}")
    report(
        run,
        path,
        lines,
        lambda log, file: curve.draw_held_out(
            log, file, "Training of an acceptance head", "weighted nats per draft"
        ),
        plot,
        json,
    )

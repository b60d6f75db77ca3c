"""Commands that train what searches, guides or structures generated text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.cli.train.app import (
    Answers,
    AnswerTokens,
    Batch,
    Encoder,
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
from anydecode.errors import CheckpointError
from anydecode.progress import note, progress
from anydecode.report import PlotFile

if TYPE_CHECKING:
    from anydecode.models.checkpoint import Checkpoint
    from anydecode.models.tokenizer import Tokenizer
    from anydecode.training.block_adapter import Pair
    from anydecode.training.pair_run import PairRun


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
        float,
        typer.Option(
            "--rate", help="Learning rate of the steps on known digits.", callback=positive
        ),
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
    from anydecode.training.own_answers import own_answers
    from anydecode.training.pair_run import PairRecipe, PairRun
    from anydecode.training.trees import tree_texts

    recipe = PairRecipe(
        minutes_or_default(minutes, steps), steps, rank=rank, batch=batch, rate=rate, seed=seed
    )
    lines = [] if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
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

    run = trained(lambda: PairRun(checkpoint, out, recipe, texts, model), "trees", threads)
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
    from anydecode.training.pairs import read_texts
    from anydecode.training.rewriter import (
        RewriterRecipe,
        RewriterRun,
        Rewriting,
        search_rewritings,
    )

    recipe = RewriterRecipe(
        minutes_or_default(minutes, steps),
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
    checkpoint = load_checkpoint(model)

    def rewritings() -> list[Rewriting]:
        with LLM(target or model, draft="none", threads=threads or None) as llm:
            return search_rewritings(llm, instructions, method, max_tokens=tokens, seed=seed)

    run = trained(lambda: RewriterRun(checkpoint, out, recipe, rewritings), "rewriter", threads)
    report(
        run,
        out,
        held_out_lines(run, "{name} of held-out rewritings"),
        curve.draw_held_out,
        plot,
        json,
    )


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
    from anydecode.training.pairs import read_texts
    from anydecode.training.sentence_diffusion import SentenceRecipe, SentenceRun

    recipe = SentenceRecipe(
        minutes_or_default(minutes, steps),
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
    checkpoint = load_checkpoint(model)
    with LLM(encoder, draft="none") as reading:
        run = trained(lambda: SentenceRun(checkpoint, reading, out, recipe, texts), "dglm", threads)
    report(
        run,
        out,
        held_out_lines(run, "loss of held-out {name}"),
        curve.draw_held_out,
        plot,
        json,
    )


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
    from anydecode.training.interleaved import interleaved_row, read_interleaved
    from anydecode.training.pair_run import PairRecipe, PairRun

    recipe = PairRecipe(
        minutes_or_default(minutes, steps), steps, rank=rank, batch=batch, rate=rate, seed=seed
    )
    translations = read_interleaved(data)
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

    run = trained(lambda: PairRun(checkpoint, out, recipe, texts, model), "translations", threads)
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

    first, *_, last = run.losses()
    report(
        run,
        run.folder,
        [f"loss of held-out texts: {first:.3f} -> {last:.3f}"],
        curve.draw_held_out,
        plot,
        json,
    )


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
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.", callback=positive)] = 5e-4,
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

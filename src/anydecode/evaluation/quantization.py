"""`anydecode bench quantization`: what a diffusion model loses in the engine's number formats.

Thresholds mean something else after quantisation, so formats are compared at the same number of
passes; and by the cross-entropy of masked tokens, whose mean over the share that is masked bounds
the negative log-likelihood of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.engine.dlm_ptq import FORMATS, GPTQ, Pair, calibrate, masked
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.evaluation.parallelbench.bench import questions
from anydecode.evaluation.parallelbench.tasks import TASKS, Example, examples
from anydecode.evaluation.report import JsonFile, write_report
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.models.transformer import Transformer
from anydecode.scoring.sequence import Sequence as Text

#: Shares of an answer that are masked.
SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Loss:
    """One format. `bytes` of all weights; `entropy` in nats per masked token, by share masked, and
    `bound`, their mean; `accuracy` and `passes` are means over the questions; `differing` is the
    share of tokens unlike the first format's."""

    format: str
    bytes: int
    entropy: dict[str, float]
    bound: float
    accuracy: float
    passes: float
    differing: float


class Teacher(Denoiser):
    """Looks once at a canvas whose answer is known: `truths` by canvas. What the answer's masked
    tokens cost, in nats each, goes into `costs`."""

    def __init__(self, truths: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.truths = truths
        self.costs: list[float] = []

    def fill(self, sequence: Text, canvas: Canvas, predictions: Predictions) -> None:
        truth = self.truths[tuple(canvas.tokens.tolist())]
        for position in canvas.masks:
            logits = predictions.logits(int(position)).astype(np.float64)
            self.costs.append(float(np.logaddexp.reduce(logits) - logits[truth[position]]))
        canvas.open(canvas.frontier, len(canvas))
        self.commit(sequence, canvas, predictions, canvas.masks)


def entropy(llm: LLM, canvases: dict[tuple[int, ...], list[int]]) -> float:
    """The mean cross-entropy of the masked tokens, in nats."""
    teacher = Teacher(canvases)
    prompts = [list(canvas) for canvas in canvases]
    llm.generate(prompts, decoder=teacher, max_tokens=max(map(len, prompts)), ignore_eos=True)
    return float(np.mean(teacher.costs))


def weight_bytes(model: Transformer) -> int:
    """Of all matrices, each once, as they are stored; norms and biases are not counted."""
    return sum({id(one): one.num_bytes for one in model.network.matrices()}.values())


def pairs(asked: Sequence[Example]) -> list[Pair]:
    """Questions and their right answers."""
    return [(example.prompt, example.answer) for example in asked]


def measure(
    model: str,
    formats: Sequence[str],
    method: str,
    groups: Sequence[Sequence[Example]],
    calibration: Sequence[Example],
    *,
    threads: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Iterator[Loss]:
    """Each format's, in order; the first is what the others are compared with. `options` go to
    `LLM.generate`."""
    asked = [example for group in groups for example in group]
    plain = load_checkpoint(model)
    reference: list[list[int]] = []
    for name in formats:
        checkpoint, dtype = plain, name
        if name == GPTQ:
            checkpoint, dtype = calibrate(plain, pairs(calibration), seed), "int4"
        size = weight_bytes(build_model(checkpoint, dtype))
        built = build_model(checkpoint, dtype, executor=choose_executor(threads=threads))
        with LLM(built, tokenizer=checkpoint.tokenizer) as llm:
            hidden = {t: masked(llm.tokenizer, pairs(asked), t, seed) for t in SHARES}
            costs = {str(t): entropy(llm, canvases) for t, canvases in hidden.items()}
            prompts = [example.prompt for example in asked]
            answers = llm.generate(prompts, decoder=method, seed=seed, ignore_eos=True, **options)
            ends = llm.tokenizer.eos_ids
            texts = [llm.tokenizer.decode(_until(one.tokens, ends)) for one in answers]
        found = [answer.tokens for answer in answers]
        reference = reference or found
        both = [p for a, b in zip(found, reference, strict=True) for p in zip(a, b, strict=False)]
        yield Loss(
            name,
            size,
            costs,
            float(np.mean([*costs.values()])),
            float(np.mean([e.is_right(t) for e, t in zip(asked, texts, strict=True)])),
            float(np.mean([answer.stats.passes for answer in answers])),
            float(np.mean([a != b for a, b in both])),
        )


def _until(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """What stands before the first end of text."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def bench_quantization(
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "tiny-diffusion"
    ),
    formats: Annotated[
        str, typer.Option("--formats", help=f"Of {', '.join(FORMATS)}; the first is compared with.")
    ] = ",".join(FORMATS),
    method: Annotated[
        str, typer.Option("--method", help="A decoder that takes the same passes for any model.")
    ] = "llada:block=0,steps=8",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; all if none.")
    ] = "",
    count: Annotated[int, typer.Option("--count", min=1, help="Examples per task and length.")] = 6,
    tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer: the canvas.")
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of questions, masks and calibration.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """What a diffusion model loses in fewer bits, at the same number of passes.

    Example: anydecode bench quantization --formats float32,int8,int4 --count 4
    """
    chosen = [name.strip() for name in formats.split(",") if name.strip()]
    for name in chosen:
        if name not in FORMATS:
            raise InvalidRequestError(f"no format {name!r}: there are {', '.join(FORMATS)}")
    if not chosen:
        raise InvalidRequestError("give at least one format")
    named = [name.strip() for name in tasks.split(",") if name.strip()] or [*TASKS]
    groups = questions(named, None, count, seed)
    seen = [one for task in named for one in examples(task, 2 * count, seed=seed, held_out=False)]
    rows = [
        *measure(
            model,
            chosen,
            method,
            groups,
            seen,
            threads=threads or None,
            seed=seed,
            max_tokens=tokens,
        )
    ]
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "method": method,
        "max_tokens": tokens,
        "questions": sum(map(len, groups)),
        "seed": seed,
        "formats": [asdict(row) for row in rows],
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """A line per format."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{report['model']}, {report['method']}: {report['questions']} held-out questions",
        highlight=False,
    )
    table = Table(box=None)
    table.add_column("format", no_wrap=True)
    shares = [f"nats at {share:g}" for share in SHARES]
    for name in ("MiB", *shares, "bound", "accuracy", "passes", "differing"):
        table.add_column(name, justify="right")
    for row in report["formats"]:
        table.add_row(
            row["format"],
            f"{row['bytes'] / 2**20:.2f}",
            *(f"{value:.4f}" for value in row["entropy"].values()),
            f"{row['bound']:.4f}",
            f"{row['accuracy']:.3f}",
            f"{row['passes']:.2f}",
            f"{row['differing']:.4f}",
        )
    console.print(table)

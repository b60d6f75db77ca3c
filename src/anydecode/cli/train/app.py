"""The group `anydecode train`, its options and what its commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anydecode.cli.command_list import CommandListGroup
from anydecode.cli.output import print_json
from anydecode.errors import InvalidRequestError
from anydecode.progress import note, progress

if TYPE_CHECKING:
    from anydecode.training.run import LossRun

app = typer.Typer(
    cls=CommandListGroup,
    help="Train small models on this machine.\n\nExample: anydecode train diffusion --minutes 10",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Run = TypeVar("Run", bound="LossRun")


def positive(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """The value of an option. Raises `InvalidRequestError` unless it is finite and above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise InvalidRequestError(
            f"--{parameter.name} is {value}; it must be a finite number above 0"
        )
    return value


def usable_folder(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """The value of an option. Raises `InvalidRequestError` if it is a file, or cannot be written
    to."""
    if folder is None:
        return None
    found = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not found.is_dir():
        raise InvalidRequestError(f"--{parameter.name} is {folder}, but {found} is a file")
    if not os.access(found, os.W_OK | os.X_OK):
        raise InvalidRequestError(
            f"--{parameter.name} is {folder}, but nothing can be written to {found}; give another"
            " folder"
        )
    return folder


Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        help="Training time in minutes. Default: 60, unless --steps is given.",
        callback=positive,
    ),
]

Steps = Annotated[
    int | None, typer.Option("--steps", help="Number of training steps, instead of --minutes.")
]

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        help="New output folder, or one of an interrupted run to resume.",
        callback=usable_folder,
    ),
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

Rate = Annotated[float, typer.Option("--rate", help="Peak learning rate.", callback=positive)]

PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="File with one prompt per line. Default: the model generates them.",
    ),
]

AnswerTokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")]


def minutes_or_default(minutes: float | None, steps: int | None) -> float | None:
    """The minutes to train: 60 if neither these nor steps are given."""
    return 60.0 if minutes is None and steps is None else minutes


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Says where an interrupted run is, which has saved its state."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted; the same command resumes the run in {folder}")
        raise


def trained(open_run: Callable[[], Run], step: str, threads: int) -> Run:
    """The run that `open_run` opens, which may generate answers, after its training with so many
    of torch's threads (0: its default)."""
    from anydecode.training.diffusion import limit_threads

    limit_threads(threads)
    with progress("training", 1.0, unit="percent") as bar:
        bar.begin("answers")
        run = open_run()
        bar.restart("training", run.progress)
        with resumable(run.folder):
            run.train(lambda done, loss: bar.update(done, step=step, detail=f"loss {loss:.3f}"))
    return run


def report(
    run: Any,
    path: Path,
    lines: Iterable[str],
    draw: Callable[[dict[str, Any], Path], object],
    plot: Path | None,
    json: bool,
) -> None:
    """Draw the curve of a run to `plot`, and print its results: the log as JSON, or `lines` to
    stderr and the `path` of what was trained."""
    log = run.log()
    if plot is not None:
        draw(log, plot)
    if json:
        print_json({"path": str(path), **log})
        return
    for line in lines:
        note(line)
    print(path)


def held_out_lines(run: LossRun, text: str, unit: str = "") -> list[str]:
    """A line for each held-out loss of a run, with the first value and the last; `text` has
    `{name}` where its name stands."""
    first, *_, last = [entry["held_out"] for entry in run.history if "held_out" in entry]
    return [
        f"{text.format(name=name)}: {first[name]:.3f} -> {loss:.3f}{unit}"
        for name, loss in last.items()
    ]


def shares_line(text: str, shares: Iterable[float]) -> str:
    """A text and shares behind it."""
    return f"{text} " + " ".join(f"{share:.3f}" for share in shares)

"""The accuracy and the passes of a method on the shipped diffusion model, relative to one token per
pass."""

from __future__ import annotations

from anydecode.certification.checks import measure
from anydecode.certification.denoising import (
    TASKS,
    accuracy_lost,
    benchmark_results,
    passes_ratio,
)

#: Tasks with one right answer, for which unmasking several tokens at once does no harm.
DETERMINED = ("copy", "reverse", "sort")


def register_losses(
    key: str, decoder: str, *, accuracy: float, passes: float, tasks: tuple[str, ...] = TASKS
) -> None:
    """Registers two measures of `key`.

    Args:
        key: The method.
        decoder: The method with its parameters.
        accuracy: The accuracy that it may lose against one token per pass.
        passes: The share of the passes that it may need.
        tasks: The tasks of the questions, 16 of each.
    """

    def lost(samples: int) -> float:
        return accuracy_lost(decoder, samples, tasks)

    def ratio(samples: int) -> float:
        return passes_ratio(decoder, samples, tasks)

    samples = 16 * len(tasks)
    where = "tasks with one right answer" if tasks == DETERMINED else "all tasks"
    name = f"accuracy lost against one token per pass, {where}"
    measure(key, name, samples=samples, margin=accuracy)(lost)
    measure(key, "passes relative to one token per pass", samples=samples, margin=passes)(ratio)


def register_wrong_answers(key: str, margin: float) -> None:
    """Registers a measure of `key`: the share of wrong answers of the shipped model whose noise is
    random tokens."""

    def share(samples: int) -> float:
        tasks = ("copy", "reverse", "shuffle")
        return 1 - benchmark_results(key, samples, tasks, "tiny-uniform").accuracy

    name = "wrong answers of a model trained with random tokens"
    measure(key, name, samples=48, margin=margin)(share)

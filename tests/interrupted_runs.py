"""Training runs that are interrupted."""

from __future__ import annotations

from typing import TypeVar

from anydecode.training.run import LossRun

Run = TypeVar("Run", bound=LossRun)


def trained(run: Run, stop: int | None = None) -> Run:
    """The run after its training; after step `stop` it is interrupted as by Ctrl-C."""

    def report(done: float, loss: float) -> None:
        if run.step == stop:
            raise KeyboardInterrupt

    run.train(report)
    return run

"""Training runs that are interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from anydecode.training.run import LossRun
from anydecode.training.weight_run import WeightRun

Run = TypeVar("Run", bound=LossRun)
OfWeights = TypeVar("OfWeights", bound=WeightRun)


def trained(run: Run, stop: int | None = None) -> Run:
    """The run after its training; after step `stop` it is interrupted as by Ctrl-C."""

    def report(done: float, loss: float) -> None:
        if run.step == stop:
            raise KeyboardInterrupt

    run.train(report)
    return run


def assert_resumes(
    open_run: Callable[[str], OfWeights], steps: int = 3
) -> tuple[OfWeights, OfWeights]:
    """Asserts that a run of so many steps that is interrupted after two of them and resumed has
    trained the weights of one that was not.

    Args:
        open_run: Opens the run in the folder of a name.
        steps: Number of steps of the run.

    Returns:
        The run that was not interrupted, and the resumed one, in the folder "parts".
    """
    whole = trained(open_run("whole"))
    with pytest.raises(KeyboardInterrupt):
        trained(open_run("parts"), stop=2)
    resumed = trained(open_run("parts"))
    assert resumed.step == steps
    for one, other in zip(whole.trained, resumed.trained, strict=True):
        assert torch.equal(one, other)
    return whole, resumed

"""Oracle test of ssd (Self Speculative Decoding, arXiv:2510.04147): the text of one token per pass
over the whole canvas, in the number of passes of the published rule."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.diffusion.stepwise_chains import equals_stepwise
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("ssd")
def ssd() -> Iterator[Check]:
    """The same over the whole canvas."""
    yield from equals_stepwise("ssd", block=0)


register_losses("ssd", "ssd:drafts=8", accuracy=0.0, passes=0.7)

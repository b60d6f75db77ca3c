"""Oracle test of freedave (Free Draft-and-Verification, arXiv:2510.00294): the text of one token
per pass, for any number of drafts, in the number of passes of the published rule."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.diffusion.stepwise_chains import equals_stepwise
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("freedave")
def freedave() -> Iterator[Check]:
    """The text of one token per pass, for any number of drafts and any cache, in fewer passes."""
    yield from equals_stepwise("freedave", block=12)


register_losses("freedave", "freedave:block=24", accuracy=0.0, passes=0.7)

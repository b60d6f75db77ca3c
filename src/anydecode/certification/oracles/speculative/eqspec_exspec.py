"""Oracle test of eqspec-exspec (Batch Speculative Decoding Done Right, arXiv:2510.22876):
realignment of a ragged batch costs nothing, and requests of different lengths share passes."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.ragged_batches import ragged_batch


@oracle_test("eqspec-exspec")
def eqspec_exspec() -> Iterator[Check]:
    """Rows of any length share passes, and none is computed or copied twice."""
    yield from penalty_checks("eqspec-exspec")
    yield from ragged_batch("eqspec-exspec")

"""Oracle test of eqspec (Batch Speculative Decoding Done Right, arXiv:2510.22876): realignment of a
ragged batch costs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.ragged_batches import ragged_batch


@oracle_test("eqspec")
def eqspec() -> Iterator[Check]:
    """Realignment of a ragged batch costs nothing."""
    yield from ragged_batch("eqspec")

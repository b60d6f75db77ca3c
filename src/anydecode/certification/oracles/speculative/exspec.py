"""Oracle test of exspec (Batch Speculative Decoding Done Right, arXiv:2510.22876): requests of
different lengths share passes."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.ragged_batches import ragged_batch


@oracle_test("exspec")
def exspec() -> Iterator[Check]:
    """Requests of different lengths share passes."""
    yield from ragged_batch("exspec")

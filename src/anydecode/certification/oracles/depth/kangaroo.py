"""Oracle test of Kangaroo: drafts of an adapter without an MLP, which end behind a token of which
the adapter is not sure."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.exit_drafts import (
    exit_checks,
    exit_penalty_checks,
    exit_rejection_checks,
)


class _Unsure:
    """Ends drafts where the largest probability is below 0.6."""

    def continues(self, token_share: float, top_share: float) -> bool:
        return not top_share < 0.6

    def observe(self, num_accepted: int, num_drafts: int) -> None:
        pass


@oracle_test("kangaroo")
def kangaroo() -> Iterator[Check]:
    """Up to six drafts of the first layers and the adapter, while its largest probability is 0.6 or
    more. Samples under the rejection rule follow the target."""
    yield from exit_penalty_checks("kangaroo:threshold=0", has_mlp=False)
    yield from exit_checks("kangaroo", 6, _Unsure, has_mlp=False, sharpness=2.0)
    yield from exit_rejection_checks("kangaroo", has_mlp=False, threshold=0.0)

"""Oracle test of space (arXiv:2402.11809): every tree follows from the masks behind the last
accepted candidate of the pass before, and samples follow the target under the rejection rule."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.mask_groups import mask_rows, traced, with_groups
from anydecode.certification.oracles.speculative.rejection_rules import (
    rejection_checks,
    small_masked_llm,
)
from anydecode.certification.oracles.speculative.state_drafters import shares
from anydecode.certification.rounds import TracedRound, accepted


@oracle_test("space")
def space() -> Iterator[Check]:
    """Candidates, masks and their order equal the oracle's; the rejection rule is exact."""
    for key, masks in (("space", 2), ("space:masks=3", 3), ("space:masks=1", 1)):
        for temperature in (0.0, 0.8):
            found = traced(key, temperature)
            equal = all(_follows(trace, masks, temperature) for trace in found)
            about = f"{key}, T={temperature}"
            yield Check(f"{about}: trees equal the oracle's", equal)
            count = sum(map(accepted, found))
            yield Check(f"{about}: drafts are accepted", count > 10, str(count))
    yield from rejection_checks("space", small_masked_llm, kind="iid")


def _follows(trace: list[TracedRound], masks: int, temperature: float) -> bool:
    """Whether every tree has the candidates of the masks behind the last accepted one, and masks
    behind each of them."""
    prefix: list[int] | None = None
    for one in trace:
        chain: list[int] = []
        for row in mask_rows(prefix, masks) if prefix else ():
            chain.append(shares(row, temperature, len(one.text) + len(chain))[0][0])
        paths = [tuple(chain[: length + 1]) for length in range(len(chain))]
        if sorted(one.paths) != sorted(with_groups(paths, masks)):
            return False
        prefix = one.text + one.generated[:-1]
    return len(trace) > 5

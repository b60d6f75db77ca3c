"""Oracle test of clover-2 (arXiv:2408.00264): as that of clover, for drafters of Clover-2."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.clover import drafted_by
from anydecode.certification.oracles.speculative.state_drafters import Drafter, compare_trees
from anydecode.certification.tiny_heads import clover_2_checkpoint

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "5 heads": clover_2_checkpoint,
    "3 heads, 1 layer, the target's embeddings": partial(
        clover_2_checkpoint, heads=3, layers=1, own_table=False
    ),
    "7 heads": partial(clover_2_checkpoint, heads=7, seed=4),
}


@oracle_test("clover-2")
def clover_2() -> Iterator[Check]:
    """The trees equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "clover-2", drafter, drafted_by(8, 5))
    key = "clover-2:size=14,depth=3,top_p=0.6,min_share=0"
    yield from compare_trees("5 heads", key, clover_2_checkpoint, drafted_by(14, 3, 0.6, 0.0))

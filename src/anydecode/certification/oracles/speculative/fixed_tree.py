"""Oracle test of fixed-tree (SpecInfer, arXiv:2305.09781): the paths of ranks, filled with the
draft model's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_trees import Path, compare_trees, draft_row
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks

#: The default shape: the ranks on the path to each node.
SHAPE = "0 1 2 00 01 10 000 001 010 0000 0001 00000"


@oracle_test("fixed-tree")
def fixed_tree() -> Iterator[Check]:
    """Rank paths filled with the draft model's tokens. Samples under the rejection rule for chosen
    siblings follow the target."""

    def oracle(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        for ranks in SHAPE.split():
            path: Path = ()
            for rank in ranks:
                path = (*path, list(draft_row(text, path, temperature))[int(rank)])
            tree.append(path)
        return tree

    yield from compare_trees("fixed-tree", oracle)
    yield from rejection_checks("fixed-tree")

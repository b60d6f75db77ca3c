"""Oracle test of fixed-tree (SpecInfer, arXiv:2305.09781): the paths of ranks, filled with the
draft model's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_trees import (
    DRAFT,
    PROMPTS,
    TARGET,
    Path,
    compare_trees,
    draft_row,
)
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import rounds, scripted

#: The default shape: the ranks on the path to each node.
SHAPE = "0 1 2 00 01 10 000 001 010 0000 0001 00000"


@oracle_test("fixed-tree")
def fixed_tree() -> Iterator[Check]:
    """Rank paths filled with the draft model's tokens. Samples under the rejection rule for chosen
    siblings follow the target."""

    yield from penalty_checks("fixed-tree")

    def oracle(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        for ranks in SHAPE.split():
            path: Path = ()
            for rank in ranks:
                path = (*path, list(draft_row(text, path, temperature))[int(rank)])
            tree.append(path)
        return tree

    yield from compare_trees("fixed-tree", oracle)
    key = "fixed-tree:acceptance=rejection"
    with scripted(TARGET, DRAFT) as llm:
        trace = [one for prompt in PROMPTS for one in rounds(llm, key, prompt, 24, temperature=0.8)]
    # The most probable tokens are those at temperature 0.
    wrong = sum(one.paths != oracle(one.text, 0.0) for one in trace)
    yield Check(f"{key} drafts the most probable tokens", wrong == 0, f"{wrong} of {len(trace)}")
    yield from rejection_checks("fixed-tree")

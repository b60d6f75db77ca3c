"""Token recycling: drafts from the target's own most probable tokens (Luo et al., "Turning Trash
into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv:2408.08696).

An adjacency matrix stores the most probable successors of each token when it was last scored. They
fill the part of a static draft tree that saves time.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.bounded_table import DEFAULT_MEMORY, BoundedTable
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    SpeculationRound,
    Speculative,
    TextDraftSession,
)
from anydecode.decoders.speculative.static_trees import WorthwhileTree
from anydecode.errors import InvalidRequestError
from anydecode.scoring.cost import DEFAULT_ROW_COST
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: The published static tree: 80 rank paths on levels of 8, 21, 25, 15, 8 and 3 nodes.
PUBLISHED = [
    tuple(map(int, path))
    for path in (
        "0 1 2 3 4 5 6 7"
        " 00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70"
        " 000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200"
        " 300 400 500"
        " 0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000"
        " 00000 00001 00002 00010 00020 00100 01000 10000"
        " 000000 000001 000100"
    ).split()
]

#: Prior acceptance rate of a successor by rank, over greedy texts of a 135M model: what
#: `anydecode bench draft-priors` prints of successors of one token alone.
RATES = (0.336, 0.087, 0.042, 0.027, 0.022, 0.017, 0.015, 0.013)


def chosen_tree(tree: str, row_cost: float | None, rule: Acceptance) -> WorthwhileTree:
    """The tree named `tree`: "published" (80 nodes), or "worthwhile", the part of it that saves
    time. So that no text depends on measured times, `DEFAULT_ROW_COST` stands for them if the text
    depends on what is drafted."""
    if tree not in ("published", "worthwhile"):
        raise InvalidRequestError(
            f"tree={tree!r}: token recycling has the trees 'published' and 'worthwhile'"
        )
    if row_cost is None and not is_token_exact(rule):
        row_cost = DEFAULT_ROW_COST
    return WorthwhileTree(PUBLISHED, RATES, 0.0 if tree == "published" else row_cost)


#: Memory of a row of the matrix without its entries, and of an entry, in bytes.
_BYTES_PER_ROW, _BYTES_PER_SUCCESSOR = 200, 40


class TokenRecyclingDrafter(Drafter):
    """Drafts from a matrix of each token's `width` most probable successors when it was last
    scored, of up to `memory` bytes.
    """

    def __init__(self, tree: WorthwhileTree, width: int = 8, memory: int = DEFAULT_MEMORY) -> None:
        self.tree = tree
        self.width = width
        self.successors: BoundedTable[int, list[int]] = BoundedTable(
            memory, _BYTES_PER_ROW + _BYTES_PER_SUCCESSOR * width
        )

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self.successors.clear()
        self.tree.clear()

    @property
    def num_bytes(self) -> int:
        return self.successors.num_bytes


class _Session(TextDraftSession):
    def __init__(self, sequence: Sequence, drafter: TokenRecyclingDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter

    def tree(self, size: int) -> TokenTree:
        successors, last = self.drafter.successors, self.text[-1]

        def candidates(tree: TokenTree, node: int) -> list[int]:
            return successors.get(last if node == ROOT else tree.tokens[node], [])

        return self.drafter.tree.shape(self.sequence).fill(candidates, size)

    def observe(self, round: SpeculationRound) -> None:
        """Count the ranks of the generated tokens, then update the successors of every scored node,
        accepted or not; of equal tokens the last in level order is kept."""
        successors, tokens = self.drafter.successors, round.result.tokens
        for before, token in zip([round.scores.tokens[0], *tokens], tokens, strict=False):
            if before in successors:
                self.drafter.tree.record(successors[before], token)
        best = round.scores.top(self.drafter.width)[0].tolist()
        successors.update(zip(round.scores.tokens, best, strict=True))


@register(
    Card(
        "token-recycling",
        "speculative",
        paper="Token Recycling (arXiv:2408.08696)",
        exactness="token-exact",
        summary="An adjacency matrix of the target's most probable tokens fills a static tree.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "tokens that were never scored draft nothing, where the paper drafts token 0",
            "the tree is the part of the paper's 80 nodes that saves time, by the measured costs of"
            " passes and by the acceptance rate of each rank, which is counted: at the prior rates"
            " 1 node where a row costs a tenth of a pass, 15 where up to 16 rows cost one pass;"
            " tree='published' takes all nodes",
            "works at any temperature; the released code is greedy only",
            "the rows of the matrix that were written longest ago are dropped where it would exceed"
            " `memory` bytes",
            LEARNS_ALONE,
        ),
        bounds={"memory": Range(0, 1 << 40)},
        remote={
            "tree": Words(("worthwhile", "published")),
            "row_cost": Range(0, 100),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def token_recycling(
    tree: str = "worthwhile",
    row_cost: float | None = None,
    acceptance: str | Acceptance = "token-exact",
    memory: int = DEFAULT_MEMORY,
) -> Speculative:
    """Token recycling.

    Args:
        tree: "worthwhile", or "published" for all 80 nodes.
        row_cost: Cost of one more row, relative to a pass over one row; None: measured costs.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
        memory: Maximum memory of the matrix, in bytes.
    """
    rule = acceptance_rule(acceptance)
    drafter = TokenRecyclingDrafter(chosen_tree(tree, row_cost, rule), memory=memory)
    return Speculative(drafter, len(PUBLISHED), rule)

"""Medusa: heads on the target's last state predict the next tokens, each one position.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv:2401.10774.

The heads are the model of the runner "draft" (`models/medusa.py` opens published ones). One pass
runs all of them on the target's state at the position before the last token. The nodes with the
largest products of head probabilities are verified.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree, TreeNoise
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.best_tree import BestTreeDrafter
from anydecode.decoders.speculative.draft_model import LEARNED
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT


class HeadsTree(GrowingTree):
    """A draft tree whose candidates depend on their level only: one pass runs the heads of `depth`
    levels."""

    def __init__(self, sequence: Sequence, runner: str, depth: int, noise: TreeNoise) -> None:
        super().__init__(sequence, runner, noise)
        self._count = min(depth, self.num_heads or depth)
        self._rows: list[np.ndarray] = []

    def start(self, chain: Seq[int] = ()) -> Generator[DecoderAction, Any, None]:
        sequence, runner, count = self.sequence, self.runner, self._count
        sequence.align(runner)
        unscored = sequence.unscored(runner)
        tokens = [*unscored, *unscored[-1:] * (count - 1)]  # the heads read no tokens
        scores = yield sequence.score(tokens, runner=runner, rows=count)
        self._rows = [scores.row(row) for row in range(count)]
        self._samplers[ROOT] = sequence.sampler.fork()
        self.store_candidates(ROOT, self._rows[0])

    def expand(self, nodes: Seq[int]) -> Generator[DecoderAction, Any, None]:
        for node in nodes:
            self._advance_sampler(node)
            self.store_candidates(node, self._rows[self.depths[node]])
        return
        yield  # a generator, as that of its base, but without a pass


class MedusaDrafter(BestTreeDrafter):
    """The best tree of up to `depth` levels, from one pass if the draft model has Medusa heads."""

    def new_tree(self, sequence: Sequence) -> GrowingTree:
        states = sequence.draft_states.get(self.runner)
        if states is None or states.reads_tokens:
            return super().new_tree(sequence)
        return HeadsTree(sequence, self.runner, self.depth, self.noise)


@register(
    Card(
        "medusa",
        "speculative",
        paper="Medusa (arXiv:2401.10774)",
        exactness="token-exact",
        summary="Heads on the target's last state draft a tree of the next tokens in one pass.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly; the paper's rule is acceptance='typical' (see"
            " typical-acceptance)",
            "the tree has the nodes with the largest products of head probabilities (the paper: a"
            " fixed tree of 63 nodes)",
            "8 nodes of up to 4 heads by default, which is faster on processors",
            "above temperature 0 a node's weight is its estimated acceptance probability given the"
            " noise that the target will use",
            "blocks of a head that shared one matrix in training are read as stored, a copy each",
            LEARNED,
            "each head counts 0.8 times the one before, and all share the target's last matrix (the"
            " paper: cross entropy with the tokens of texts, and a matrix for each head)",
            "with a draft model that reads tokens, the same tree, one pass per level",
        ),
        remote={"size": Range(1, 64), "depth": Range(1, 32), "acceptance": ACCEPTANCE_WORDS},
    )
)
def medusa(
    size: int = 8, depth: int = 4, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Medusa heads.

    Args:
        size: Number of verified nodes.
        depth: Number of levels; as many heads run, if the draft model has so many.
        acceptance: "token-exact", "rejection", "typical" (the paper's), "top-m" or "judge", or
            a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(MedusaDrafter(depth, rule), size, rule)

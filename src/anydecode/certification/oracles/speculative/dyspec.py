"""Oracle test of dyspec (arXiv:2410.11744): the tree of the paper's heap, grown one sample at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import DRAFT_SCRIPT, PROMPT, fit, sampled, small_llm
from anydecode.certification.oracles.speculative.draft_trees import Path, compare_trees, draft_row
from anydecode.certification.oracles.speculative.rejection_rules import (
    SAMPLES,
    TEMPERATURE,
    rejection_checks,
)
from anydecode.decoders.framework.acceptance import AcceptanceResult
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree


@oracle_test("dyspec")
def dyspec() -> Iterator[Check]:
    """The paper's heap: one sample at a time, residuals as whole vectors. Samples under the paper's
    rejection rule follow the target."""

    def grown(text: list[int], temperature: float, size: int) -> list[Path]:
        def slot(path: Path) -> tuple[list[int], np.ndarray]:
            row = draft_row(text, path, temperature)
            return list(row), np.array([q for q, _ in row.values()])

        heap: list[tuple[float, int, Path, list[int], np.ndarray]] = []
        count = 0
        tree: list[Path] = []
        heappush(heap, (-1.0, count, (), *slot(())))
        while len(tree) < size:
            negative, _, parent, tokens, residual = heappop(heap)
            share = residual[0] / residual.sum()
            tree.append((*parent, tokens[0]))
            count += 1
            heappush(heap, (negative * (1 - share), count, parent, tokens[1:], residual[1:]))
            count += 1
            heappush(heap, (negative * share, count, tree[-1], *slot(tree[-1])))
        return tree

    for key, size in (("dyspec", 16), ("dyspec:size=10", 10)):
        yield from compare_trees(key, partial(grown, size=size))
    yield from rejection_checks("dyspec")
    rule, options = FirstSiblings(), {"temperature": TEMPERATURE}
    with small_llm() as llm:
        sampled(llm, catalogue.build("dyspec", acceptance=rule), options, SAMPLES)
    weights = np.exp(DRAFT_SCRIPT(tuple(PROMPT)).astype(np.float64) / TEMPERATURE)
    found = fit(rule.first, {(at,): w for at, w in enumerate(weights / weights.sum())})
    name = "under the rejection rule siblings are drawn, and compared with what they are drawn from"
    yield Check(name, found.passed and rule.has_distributions, str(found))


class FirstSiblings(RejectionSampling):
    """The rule, with the first drafts behind the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[tuple[int]] = []
        self.has_distributions = True

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        if scores.sequence.length == len(PROMPT):
            self.first.append((tree.tokens[tree.children(ROOT)[0]],))
            self.has_distributions &= tree.kind == "wor" and ROOT in tree.probabilities
        return super().walk(tree, scores)

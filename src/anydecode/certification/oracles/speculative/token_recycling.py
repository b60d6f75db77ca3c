"""Oracle test of token-recycling (arXiv:2408.08696): the published tree, filled from a matrix that
is replayed from the rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.token_recycling import PUBLISHED


@oracle_test("token-recycling")
def token_recycling() -> Iterator[Check]:
    """The 80 published nodes; the matrix has each token's last top-8 successors."""
    levels = Counter(map(len, PUBLISHED))
    yield Check(
        "the published tree has 8, 21, 25, 15, 8 and 3 nodes on its levels",
        [levels[depth] for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3],
    )
    logits = wordy()
    total = 0
    # Expected tokens per cost at 0.1 a row: 1.37 / 1.1, 1.507 / 1.2, 1.597 / 1.3, so two nodes pay.
    for tree, paths in (("published", PUBLISHED), ("worthwhile", [(0,), (0, 0)])):
        with scripted(logits) as llm:
            trace: list[TracedRound] = []
            for prompt in PROMPTS:
                trace += rounds(llm, f"token-recycling:tree={tree}", prompt)
        matrix: dict[int, list[int]] = {}
        wrong = 0
        for one in trace:
            expected = {tuple(_follow(matrix, one.text[-1], path)) for path in paths} - {()}
            wrong += set(one.paths) != expected
            for path in [(), *one.paths]:
                row = logits((*one.text, *path))
                last = (*one.text, *path)[-1]
                matrix[last] = np.argsort(-row, kind="stable")[:8].tolist()
        total += accepted(trace)
        yield Check(f"the {tree} tree equals the oracle", wrong == 0, f"{len(trace)} rounds")
    yield Check("drafts are accepted", total > 0, f"{total}")


def _follow(matrix: dict[int, list[int]], token: int, ranks: tuple[int, ...]) -> list[int]:
    path: list[int] = []
    for rank in ranks:
        if token not in matrix:
            return []
        token = matrix[token][rank]
        path.append(token)
    return path

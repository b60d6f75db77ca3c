"""Oracle test of token-recycling (arXiv:2408.08696): the published tree, filled from a matrix that
is replayed from the rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.worthwhile_trees import WorthwhileRanks, seconds
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.token_recycling import PUBLISHED

#: The published tree by the number of children of each node, which is named by its rank path.
CHILDREN = (
    "0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1"
    " 00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1"
    " 000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1"
    " 0000:3 0001:1 0002:1 0010:1 0100:1 1000:1 00000:2 00010:1"
)


@oracle_test("token-recycling")
def token_recycling() -> Iterator[Check]:
    """The 80 published nodes; the matrix has each token's last top-8 successors. By default the
    part of the tree is drafted that has the most expected tokens per second, by the costs of passes
    and the rates of ranks so far."""
    levels = Counter(map(len, PUBLISHED))
    yield Check(
        "the published tree has 8, 21, 25, 15, 8 and 3 nodes on its levels",
        [levels[depth] for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3],
    )
    numbers = [("", 8), *(_node(part) for part in CHILDREN.split())]
    paths = {f"{parent}{rank}" for parent, count in numbers for rank in range(count)}
    is_equal = {"".join(map(str, path)) for path in PUBLISHED} == paths
    yield Check("the published tree has its nodes' numbers of children", is_equal)
    yield from _compare("token-recycling:tree=published", is_whole=True)
    yield from _compare("token-recycling", is_whole=False)


def _compare(key: str, is_whole: bool) -> Iterator[Check]:
    logits = wordy()
    chosen = WorthwhileRanks(PUBLISHED)
    with scripted(logits) as llm:
        llm.cost_model = FixedCosts(seconds)
        trace: list[TracedRound] = []
        for prompt in PROMPTS:
            trace += rounds(llm, key, prompt)
    matrix: dict[int, list[int]] = {}
    wrong, sizes = 0, set()
    for one in trace:
        paths = PUBLISHED if is_whole else chosen.choose(len(one.text))
        sizes.add(len(paths))
        expected = {tuple(_follow(matrix, one.text[-1], path)) for path in paths} - {()}
        wrong += set(one.paths) != expected
        for before, token in zip([one.text[-1], *one.generated], one.generated, strict=False):
            if before in matrix:
                chosen.saw(matrix[before], token)
        for path in [(), *one.paths]:
            row = logits((*one.text, *path))
            last = (*one.text, *path)[-1]
            matrix[last] = np.argsort(-row, kind="stable")[:8].tolist()
    yield Check(f"the trees of {key} equal the oracle's", wrong == 0, f"{len(trace)} rounds")
    yield Check(f"{key}: drafts are accepted", accepted(trace) > 0, f"{accepted(trace)}")
    if not is_whole:
        yield Check("the number of nodes follows the rates", len(sizes) > 1, f"{sorted(sizes)}")


def _node(part: str) -> tuple[str, int]:
    """A node's rank path and its number of children."""
    path, _, count = part.partition(":")
    return path, int(count)


def _follow(matrix: dict[int, list[int]], token: int, ranks: tuple[int, ...]) -> list[int]:
    path: list[int] = []
    for rank in ranks:
        if token not in matrix:
            return []
        token = matrix[token][rank]
        path.append(token)
    return path

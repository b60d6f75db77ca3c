"""Recursive speculative decoding: draft trees sampled without replacement (Jeon et al., "Recursive
Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
arXiv:2402.14160).

RSD-C draws a constant number of children per level. RSD-S keeps the best draws of a level by
stochastic beam search.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, TREE_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class ConstantBranching(TreeDrafter):
    """RSD-C: `branching[l]` children of every node of level l, drawn by Gumbel-top-k."""

    kind = "wor"

    def __init__(self, branching: tuple[int, ...], rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        if not branching or min(branching) < 1:
            raise InvalidRequestError(
                "rsd needs at least one level, and at least one child on each"
            )
        self.branching = branching

    @property
    def size(self) -> int:
        """Number of nodes of the whole tree."""
        return int(np.cumprod(self.branching).sum())

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        level = [ROOT]
        for depth, count in enumerate(self.branching):
            if depth:
                yield from growing.expand(level)
            level = [
                growing.add(int(token), node)
                for node in level
                for token in growing.candidates[node].tokens[:count]
            ]
            if len(growing.tree) >= size:
                break
        return list(range(min(size, len(growing.tree))))


def condition_on_parent(parent_key: float, keys: np.ndarray) -> np.ndarray:
    """The Gumbel keys of children, conditioned on their maximum being `parent_key`:
    -log(exp(-parent_key) - exp(-max) + exp(-key)), computed without overflow. At the maximum the
    result is `parent_key`."""
    gap = keys - keys.max()
    with np.errstate(divide="ignore"):
        v = parent_key - keys + np.log1p(-np.exp(gap))
    result: np.ndarray = parent_key - np.maximum(v, 0.0) - np.log1p(np.exp(-np.abs(v)))
    return result


class StochasticBeam(TreeDrafter):
    """RSD-S: keeps the `width` children with the largest conditioned keys on every level (Kool et
    al., stochastic beam search, arXiv:1903.06059). At temperature 0 this is plain beam search."""

    kind = "wor"

    def __init__(self, width: int, depth: int, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        if width < 1 or depth < 1:
            raise InvalidRequestError("rsd needs width >= 1 and depth >= 1")
        self.width = width
        self.depth = depth

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        is_greedy = growing.sequence.sampler.is_greedy
        log_probabilities, keys = {ROOT: 0.0}, {ROOT: 0.0}
        beam = [ROOT]
        for depth in range(self.depth):
            if depth:
                yield from growing.expand(beam)
            options: list[tuple[float, float, int, int]] = []
            for node in beam:
                candidates = growing.candidates[node]
                if not len(candidates.tokens):
                    continue
                local = np.log(candidates.probabilities)
                raw = log_probabilities[node] + candidates.keys
                child_keys = raw if is_greedy else condition_on_parent(keys[node], raw)
                options += [
                    (
                        float(child_keys[i]),
                        log_probabilities[node] + float(local[i]),
                        node,
                        int(candidates.tokens[i]),
                    )
                    for i in range(min(self.width, len(child_keys)))
                ]
            options.sort(key=lambda option: -option[0])
            beam = []
            for key, log, parent, token in options[: min(self.width, size - len(growing.tree))]:
                node = growing.add(token, parent)
                keys[node], log_probabilities[node] = key, log
                beam.append(node)
            if not beam:
                break
        return list(range(len(growing.tree)))


@register(
    Card(
        "rsd",
        "speculative",
        paper="Recursive Speculative Decoding (arXiv:2402.14160), RSD-C and RSD-S",
        exactness="token-exact",
        summary=(
            "Siblings are drawn without replacement, with constant branching or by"
            " stochastic beam search."
        ),
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly, with draws from the noise that the target will use; the"
            " paper's rule is acceptance='rejection'",
            TREE_NOISE,
            "the draft distribution is cut to its 64 most probable tokens",
            "at temperature 0, where draws are not random, top-k and beam search",
        ),
        remote={
            "width": Range(1, 16),
            "depth": Range(1, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def rsd(
    width: int = 3,
    depth: int = 4,
    branching: str = "",
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Recursive speculative decoding: RSD-S, or RSD-C if `branching` is given.

    Args:
        width: Beam width of RSD-S.
        depth: Depth of RSD-S.
        branching: Children per node on each level of RSD-C, such as "3-2-1".
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    if not branching:
        return Speculative(StochasticBeam(width, depth, rule), width * depth, rule)
    try:
        counts = tuple(int(part) for part in str(branching).split("-"))
    except ValueError:
        raise InvalidRequestError(
            f"branching={branching!r} is not a list of numbers such as 3-2-1"
        ) from None
    constant = ConstantBranching(counts, rule)
    return Speculative(constant, constant.size, rule)

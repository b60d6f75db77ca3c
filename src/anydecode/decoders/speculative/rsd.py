"""Draft trees sampled without replacement (Jeon et al., "Recursive Speculative Decoding:
Accelerating LLM Inference via Sampling Without Replacement", arXiv:2402.14160)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.draft_trees import GrowingTree, TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class ConstantBranching(TreeDrafter):
    """RSD-C: `branching[l]` children of every node of level l, drawn by Gumbel-top-k."""

    kind = "wor"

    def __init__(self, branching: tuple[int, ...], with_probabilities: bool = False) -> None:
        super().__init__(with_probabilities)
        if not branching or min(branching) < 1:
            raise InvalidRequestError("rsd needs at least one level, and one child on each")
        self.branching = branching

    @property
    def size(self) -> int:
        """Nodes of the whole tree."""
        return int(np.cumprod(self.branching).sum())

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        level = [ROOT]
        for depth, count in enumerate(self.branching):
            if depth:
                yield from growing.expand(level)
            level = [
                growing.add(int(token), node)
                for node in level
                for token in growing.guesses[node].tokens[:count]
            ]
            if len(growing.tree) >= size:
                break
        return list(range(min(size, len(growing.tree))))


def conditioned(above: float, keys: np.ndarray) -> np.ndarray:
    """Gumbel keys of children given that the largest of them is their parent's key `above`:
    -log(exp(-above) - exp(-max) + exp(-key)), without overflow. At the maximum it is `above`."""
    gap = keys - keys.max()
    with np.errstate(divide="ignore"):
        v = above - keys + np.log1p(-np.exp(gap))
    result: np.ndarray = above - np.maximum(v, 0.0) - np.log1p(np.exp(-np.abs(v)))
    return result


class StochasticBeam(TreeDrafter):
    """RSD-S: on every level the `width` children with the largest conditioned keys (Kool et al.,
    stochastic beam search, arXiv:1903.06059). At temperature 0 a plain beam search."""

    kind = "wor"

    def __init__(self, width: int, depth: int, with_probabilities: bool = False) -> None:
        super().__init__(with_probabilities)
        if width < 1 or depth < 1:
            raise InvalidRequestError("rsd needs width and depth of at least 1")
        self.width = width
        self.depth = depth

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        greedy = growing.sequence.sampler.is_greedy
        logs, keys = {ROOT: 0.0}, {ROOT: 0.0}
        beam = [ROOT]
        for depth in range(self.depth):
            if depth:
                yield from growing.expand(beam)
            options: list[tuple[float, float, int, int]] = []
            for node in beam:
                guesses = growing.guesses[node]
                local = np.log(guesses.probabilities)
                raw = logs[node] + guesses.keys
                found = raw if greedy else conditioned(keys[node], raw)
                options += [
                    (float(found[i]), logs[node] + float(local[i]), node, int(guesses.tokens[i]))
                    for i in range(min(self.width, len(found)))
                ]
            options.sort(key=lambda option: -option[0])
            beam = []
            for key, log, parent, token in options[: min(self.width, size - len(growing.tree))]:
                node = growing.add(token, parent)
                keys[node], logs[node] = key, log
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
        summary="Siblings are drawn without replacement, by branching or stochastic beams.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly: the draws use the noise the target will use",
            "the draft distribution is cut to its 64 likeliest tokens",
            "at temperature 0, where draws are not random, top-k and beam search",
        ),
    )
)
def rsd(
    width: int = 3, depth: int = 4, branching: str = "", with_probabilities: bool = False
) -> Speculative:
    """RSD-S with `width` and `depth`, or RSD-C with `branching` such as "3-2-1"."""
    if not branching:
        beams = StochasticBeam(width, depth, with_probabilities)
        return Speculative(beams, width * depth)
    try:
        counts = tuple(int(part) for part in str(branching).split("-"))
    except ValueError:
        raise InvalidRequestError(f"branching={branching!r} is no list such as 3-2-1") from None
    constant = ConstantBranching(counts, with_probabilities)
    return Speculative(constant, constant.size)

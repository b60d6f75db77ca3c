"""Tokens whose prediction has stopped moving (Chen et al., "Beyond Confidence: Adaptive and
Coherent Decoding for Diffusion Language Models", arXiv:2512.02044): coherent contextual decoding,
as the paper states it and as it was released, with a fixed or a dynamic budget."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks, WholeCanvas
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Entropy, best_first
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy, best
from anydecode.errors import InvalidRequestError


class Coherent(UnmaskPolicy):
    """A share of the masks per pass as `TopK`; which of them, the history says. `dynamic` commits
    every coherent mask, where those are more."""

    def __init__(self, steps: int | None, *, dynamic: bool) -> None:
        self.schedule = TopKUnmasking(steps)
        self.dynamic = dynamic

    def opened(self, canvas: Canvas) -> None:
        canvas.memory["ccd"] = []

    def _budget(self, found: int, count: int) -> int:
        return max(found, count) if self.dynamic else count


class Averaged(Coherent):
    """The paper's rule. The history of a pass is the `keep` surest masks with their distributions.
    Masks in the last `depth` histories, this one included, are ranked by the entropy of their mean
    distribution, least first."""

    def __init__(self, steps: int | None, *, dynamic: bool, depth: int, keep: int) -> None:
        super().__init__(steps, dynamic=dynamic)
        if depth < 1 or keep < 1:
            raise InvalidRequestError("the history needs a pass and a position")
        self.depth = depth
        self.keep = keep

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        surest = best_first(predictions.confidence(positions))[: self.keep]
        now = {int(positions[i]): predictions.probabilities(positions[i]) for i in surest}
        history: list[dict[int, np.ndarray]] = [*canvas.memory["ccd"], now][-self.depth :]
        canvas.memory["ccd"] = history
        coherent = np.full(len(positions), -np.inf)
        for i, position in enumerate(positions.tolist()):
            if len(history) == self.depth and all(position in one for one in history):
                mean = np.sum([one[position] for one in history], axis=0) / self.depth
                likely = mean[mean > 0]
                coherent[i] = float((likely * np.log(likely)).sum())
        found = int(np.count_nonzero(np.isfinite(coherent)))
        count = self.schedule.quota(canvas)
        if not found:
            return best(ranks, count)
        return best(coherent, min(found, self._budget(found, count)))


class Agreeing(Coherent):
    """The released rule. A pass remembers the next-best masks behind those it filled, first one and
    then one more each pass, up to `quota` + int(4 `quota`). Where one of the best is remembered,
    the remembered ones among the best that predict the same token as a pass ago are filled; else,
    and in the first `warm_up` passes, the best."""

    expansion = 4

    def __init__(self, steps: int | None, *, dynamic: bool, warm_up: int = 5) -> None:
        super().__init__(steps, dynamic=dynamic)
        if warm_up < 0:
            raise InvalidRequestError("the passes to warm up cannot be negative")
        self.warm_up = warm_up

    def opened(self, canvas: Canvas) -> None:
        canvas.memory["ccd"] = ({}, frozenset(), 1)  # tokens a pass ago, the remembered, how many

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        before, remembered, reach = canvas.memory["ccd"]
        count = self.schedule.quota(canvas)
        order = best_first(ranks)
        tokens = {int(position): predictions.facts(position).best for position in positions}
        chosen = best(ranks, count)
        if canvas.block_step >= self.warm_up:
            if any(int(positions[i]) in remembered for i in order[:count]):
                agreed = [
                    i
                    for i in order[:reach]
                    if int(positions[i]) in remembered
                    and before[int(positions[i])] == tokens[int(positions[i])]
                ]
                if len(agreed) >= count:
                    chosen[:] = False
                    chosen[agreed[: self._budget(len(agreed), count)]] = True
            reach = min(reach + 1, count + int(self.expansion * count))
        behind = [int(positions[i]) for i in order if not chosen[i]][:reach]
        canvas.memory["ccd"] = (tokens, frozenset(behind), reach)
        return chosen


@register(
    Card(
        "ccd",
        "diffusion",
        paper="Beyond Confidence: Adaptive and Coherent Decoding (arXiv:2512.02044)",
        exactness="lossy",
        summary="Fills masks whose prediction has held over the last passes, more when more agree.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "rule=averaged is the paper's formula with our reading of the selection order;"
            " rule=agreement is the released code's",
            "the released code is written for one request at a time",
            "the number remembered grows after the warm-up only",
        ),
    )
)
def ccd(
    rule: str = "agreement",
    dynamic: bool = True,
    steps: int | None = None,
    warm_up: int = 5,
    depth: int = 2,
    keep: int = 4,
    block: int = 0,
    mask: int | None = None,
) -> Denoiser:
    """`rule` "agreement" wants the same token in two passes after `warm_up` ones; "averaged" ranks
    by the entropy of the mean distribution over `depth` passes, of the `keep` surest masks of each.
    `dynamic` fills all that agree, else as many as `steps` passes need. `block` 0: the canvas."""
    if rule == "agreement":
        unmask: Coherent = Agreeing(steps, dynamic=dynamic, warm_up=warm_up)
    elif rule == "averaged":
        unmask = Averaged(steps, dynamic=dynamic, depth=depth, keep=keep)
    else:
        raise InvalidRequestError(f"rule is agreement or averaged; {rule!r} is neither")
    return Denoiser(FixedBlocks(block) if block else WholeCanvas(), Entropy(), unmask, mask=mask)

"""Coherent contextual decoding (Chen et al., "Beyond Confidence: Adaptive and Coherent Decoding for
Diffusion Language Models", arXiv:2512.02044).

Masks are unmasked whose prediction has been stable over the last passes. Both the paper's rule
(averaged distributions) and that of the released code (agreement) are here, each with a fixed or a
dynamic number of tokens per pass.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks, WholeCanvas
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Entropy, best_first
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy, top_k
from anydecode.errors import InvalidRequestError


class CoherentUnmasking(UnmaskPolicy):
    """Unmasks as many masks per step as `TopKUnmasking`, chosen by their history.

    Args:
        steps: Denoising steps per block (default: one per mask).
        dynamic: Unmask every coherent mask, if those are more.
    """

    def __init__(self, steps: int | None, *, dynamic: bool) -> None:
        self.schedule = TopKUnmasking(steps)
        self.dynamic = dynamic

    def on_block_opened(self, canvas: Canvas) -> None:
        canvas.policy_state["ccd"] = []

    def _budget(self, num_coherent: int, count: int) -> int:
        return max(num_coherent, count) if self.dynamic else count


class AveragedCoherence(CoherentUnmasking):
    """The paper's rule.

    The history of a pass is the `keep` most confident masks with their distributions. Masks in all
    of the last `depth` histories, with this pass, are ranked by the entropy of their mean
    distribution; the lowest comes first.
    """

    def __init__(self, steps: int | None, *, dynamic: bool, depth: int, keep: int) -> None:
        super().__init__(steps, dynamic=dynamic)
        if depth < 1 or keep < 1:
            raise InvalidRequestError(
                f"ccd needs depth >= 1 and keep >= 1, not depth={depth}, keep={keep}"
            )
        self.depth = depth
        self.keep = keep

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        most_confident = best_first(predictions.confidence(positions))[: self.keep]
        current = {
            int(positions[i]): predictions.probabilities(positions[i]) for i in most_confident
        }
        history: list[dict[int, np.ndarray]] = [*canvas.policy_state["ccd"], current][-self.depth :]
        canvas.policy_state["ccd"] = history
        coherent = np.full(len(positions), -np.inf)
        for i, position in enumerate(positions.tolist()):
            if len(history) == self.depth and all(position in past for past in history):
                mean = np.sum([past[position] for past in history], axis=0) / self.depth
                likely = mean[mean > 0]
                coherent[i] = float((likely * np.log(likely)).sum())
        num_coherent = int(np.count_nonzero(np.isfinite(coherent)))
        count = self.schedule.quota(canvas)
        if not num_coherent:
            return top_k(ranks, count)
        return top_k(coherent, min(num_coherent, self._budget(num_coherent, count)))


class AgreementCoherence(CoherentUnmasking):
    """The rule of the released code.

    Each pass remembers the best-ranked masks after those it unmasked: one mask at first, and one
    more in each pass after the warm-up, up to `quota + int(4 * quota)`. If one of the `quota` best
    masks is remembered from the pass before, remembered masks that predict the same token as then
    are unmasked. If there are fewer than `quota` of them, and in the first `warm_up` passes, the
    `quota` best masks are unmasked.
    """

    expansion = 4

    def __init__(self, steps: int | None, *, dynamic: bool, warm_up: int = 5) -> None:
        super().__init__(steps, dynamic=dynamic)
        if warm_up < 0:
            raise InvalidRequestError(f"warm_up must be at least 0, not {warm_up}")
        self.warm_up = warm_up

    def on_block_opened(self, canvas: Canvas) -> None:
        canvas.policy_state["ccd"] = (
            {},
            frozenset(),
            1,
        )  # tokens of the last pass, remembered masks, how many to remember

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        previous, remembered, num_remembered = canvas.policy_state["ccd"]
        count = self.schedule.quota(canvas)
        order = best_first(ranks)
        tokens = {int(position): predictions.statistics(position).best for position in positions}
        chosen = top_k(ranks, count)
        if canvas.block_step >= self.warm_up:
            if any(int(positions[i]) in remembered for i in order[:count]):
                agreed = [
                    i
                    for i in order[:num_remembered]
                    if int(positions[i]) in remembered
                    and previous[int(positions[i])] == tokens[int(positions[i])]
                ]
                if len(agreed) >= count:
                    chosen[:] = False
                    chosen[agreed[: self._budget(len(agreed), count)]] = True
            num_remembered = min(num_remembered + 1, count + int(self.expansion * count))
        next_best = [int(positions[i]) for i in order if not chosen[i]][:num_remembered]
        canvas.policy_state["ccd"] = (tokens, frozenset(next_best), num_remembered)
        return chosen


@register(
    Card(
        "ccd",
        "diffusion",
        paper="Beyond Confidence: Adaptive and Coherent Decoding (arXiv:2512.02044)",
        exactness="lossy",
        summary="Unmasks masks whose prediction was stable over the last passes.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "rule=averaged is the paper's formula with our interpretation of the selection order;"
            " rule=agreement is that of the released code",
            "works with batches, while the released code handles one request at a time",
            "the number of remembered masks grows only after the warm-up",
        ),
        remote={
            "rule": Words(("agreement", "averaged")),
            "steps": Range(1, 4096),
            "warm_up": Range(0, 4096),
            "depth": Range(1, 32),
            "keep": Range(1, 64),
            "block": Range(0, 4096),
            "cache": CACHE_WORDS,
        },
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
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises masks whose prediction is stable.

    Args:
        rule: "agreement" requires the same token in two passes; "averaged" ranks masks by the
            entropy of their mean distribution over several passes.
        dynamic: Unmask all stable masks, not only as many as `steps` requires.
        steps: Denoising steps per block (default: one per mask).
        warm_up: For "agreement", the first passes of a block in which the rule is not applied.
        depth: For "averaged", the number of passes.
        keep: For "averaged", how many of the most confident masks each pass records.
        block: Positions per block (0: the whole canvas).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if rule == "agreement":
        unmask: CoherentUnmasking = AgreementCoherence(steps, dynamic=dynamic, warm_up=warm_up)
    elif rule == "averaged":
        unmask = AveragedCoherence(steps, dynamic=dynamic, depth=depth, keep=keep)
    else:
        raise InvalidRequestError(f"rule={rule!r} is unknown; it must be agreement or averaged")
    return Denoiser(
        FixedBlocks(block) if block else WholeCanvas(),
        Entropy(),
        unmask,
        cache_named(cache),
        mask=mask,
    )

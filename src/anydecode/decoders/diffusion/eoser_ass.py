"""EOS early rejection and the ascending step-size schedule (Yang et al., "Taming Masked Diffusion
Language Models via Consistency Trajectory Reinforcement Learning with Fewer Decoding Step",
arXiv:2509.23924).

The number of tokens per step doubles, so a canvas takes logarithmically many steps. In early steps
the confidence of an end of text is reduced. The paper's training is `anydecode train cj-grpo`.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import BlockPolicy, WholeCanvas
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy, top_k
from anydecode.errors import InvalidRequestError

#: The first factor on the confidence of an end of text with the ascending schedule.
ASCENDING_FACTOR = 0.01


def num_steps(length: int) -> int:
    """The number of steps of the ascending schedule: floor(log2(length)), at least 1."""
    return max(1, length.bit_length() - 1)


class AscendingUnmasking(UnmaskPolicy):
    """Unmasks 2^i masks in step i of the canvas, and all that remain in the last step."""

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        total = canvas.policy_state.setdefault("masks", len(canvas.masks))
        if canvas.step >= num_steps(total) - 1 and canvas.block[1] == len(canvas):  # type: ignore[index]
            return np.ones(len(positions), bool)
        return top_k(ranks, 1 << canvas.step)


class PowerOfTwoBlocks(BlockPolicy):
    """`count` blocks whose sizes are powers of two, taken from the end of the canvas.

    Each of them is unmasked in one step, except the first, which has the remaining positions.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InvalidRequestError(f"blocks must be at least 1, not {count}")
        self.count = count

    def window_end(self, canvas: Canvas) -> int:
        ends = canvas.policy_state.setdefault("ends", self._ends(canvas.frontier, len(canvas)))
        return int(next(end for end in ends if end > canvas.frontier))

    def _ends(self, first: int, stop: int) -> list[int]:
        """The end of every block, ascending."""
        remaining, ends = stop - first, [stop]
        step = num_steps(remaining) - 1  # the step that unmasks the last block
        total = remaining
        while len(ends) < self.count and step > 0:
            size = total - (1 << step) + 1 if len(ends) == 1 else 1 << step
            remaining -= size
            ends.append(first + remaining)
            step -= 1
        return ends[::-1]


class EarlyEosRejection(Confidence):
    """Confidence, reduced for an end of text.

    The confidence of an end of text is multiplied by a factor that grows from `min_factor` to 1
    with progress: the share of unmasked positions, or (2^(i+1) - 1) / 2^S in step i of the S steps
    of the ascending schedule.
    """

    def __init__(self, min_factor: float, *, ascending: bool) -> None:
        if not 0 <= min_factor <= 1:
            raise InvalidRequestError(f"min_factor must be between 0 and 1, not {min_factor}")
        self.min_factor = min_factor
        self.ascending = ascending

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        ranks = super().rank(canvas, predictions, positions)
        ends = [
            predictions.sequence.stops_at(predictions.token(position)) for position in positions
        ]
        total = canvas.policy_state.setdefault("masks", len(canvas.masks))
        if self.ascending:
            progress = ((2 << canvas.step) - 1) / (1 << num_steps(total))
        else:
            num_committed = np.count_nonzero(canvas.committed >= 0)
            progress = num_committed / max(1, total - 1)
        ranks[ends] *= self.min_factor + (1 - self.min_factor) * min(1.0, progress)
        return ranks


@register(
    Card(
        "eoser-ass",
        "diffusion",
        paper="Taming Masked Diffusion Language Models (arXiv:2509.23924)",
        exactness="lossy",
        summary="Unmasks 1, 2, 4, 8 ... tokens per step; reduces early end-of-text confidence.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the progress of the uniform schedule is the share of unmasked positions",
            "CJ-GRPO (`anydecode train cj-grpo`) trains all weights, with the ascending schedule;"
            " its reference model stays as it was, and the model must have no blocks",
        ),
        remote={
            "schedule": Words(("ascending", "uniform")),
            "min_factor": Range(0, 1),
            "blocks": Range(1, 64),
            "steps": Range(1, 4096),
            "cache": CACHE_WORDS,
        },
    )
)
def eoser_ass(
    schedule: str = "ascending",
    min_factor: float | None = None,
    blocks: int = 1,
    steps: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises the whole canvas in few steps, and reduces the confidence of an early end of text.

    Args:
        schedule: "ascending" doubles the number of tokens in each step; "uniform" unmasks equally
            many in each.
        min_factor: The first factor on the confidence of an end of text (default: 0.01 for
            "ascending", 0.4 for "uniform").
        blocks: For "ascending", the number of blocks.
        steps: For "uniform", the number of steps (default: one per mask).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if schedule == "ascending":
        if steps is not None:
            raise InvalidRequestError(
                f"steps={steps} works with schedule=uniform only; leave it out"
            )
        eos_rejection = EarlyEosRejection(
            ASCENDING_FACTOR if min_factor is None else min_factor, ascending=True
        )
        return Denoiser(
            PowerOfTwoBlocks(blocks),
            eos_rejection,
            AscendingUnmasking(),
            cache_named(cache),
            mask=mask,
        )
    if schedule != "uniform":
        raise InvalidRequestError(
            f"schedule={schedule!r} is unknown; it must be ascending or uniform"
        )
    if blocks != 1:
        raise InvalidRequestError(
            f"blocks={blocks} works with schedule=ascending only; leave it out"
        )
    eos_rejection = EarlyEosRejection(0.4 if min_factor is None else min_factor, ascending=False)
    return Denoiser(
        WholeCanvas(), eos_rejection, TopKUnmasking(steps), cache_named(cache), mask=mask
    )

"""RemeDi (Huang et al., "Don't Settle Too Early: Self-Reflective Remasking for Diffusion Language
Models", arXiv:2509.23653): each step fills all masks of the block, ranks all its tokens, keeps the
best-ranked ones and masks the others again."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import STATEFUL, RevisedBlocks, RevisingDenoiser
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, top_k
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.sequence import Sequence

#: What tokens can be ranked by.
RANKS = Words(("confidence", "logit"))


class SelfReflection(RevisingDenoiser):
    """Keeps as many tokens in step k as a schedule has unmasked after it: the sampled token of a
    mask, the held one of another position.

    They are ranked by the confidences of the model's second stream, or by their logits.
    """

    def __init__(
        self, steps: int | None, block: int | None, rank: str | None, cache: str, mask: int | None
    ) -> None:
        if rank is not None and rank not in RANKS.words:
            raise InvalidRequestError(f"rank={rank!r} is unknown; it must be confidence or logit")
        self.rank = rank
        self.schedule = TopKUnmasking(steps)
        policy = cache_named(cache, REVISING_CACHES)
        super().__init__(RevisedBlocks(block), unmask=self.schedule, cache=policy, mask=mask)

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if self.rank == "confidence" and not self._reads_confidences(sequence):
            raise UnsupportedCombinationError(
                "rank=confidence needs a model whose tokens have confidences (RemeDi); this one has"
                " none: leave rank out"
            )

    def captured_layers(self, sequence: Sequence) -> tuple[int, ...]:
        if not self._reads_confidences(sequence):
            return ()
        return (sequence.model().spec.num_layers,)

    def _reads_confidences(self, sequence: Sequence) -> bool:
        has_confidences = getattr(sequence.model(), "has_confidences", False)
        return bool(has_confidences) and self.rank != "logit"

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        positions = self.free_positions(canvas)
        was_masked = canvas.committed[positions] == MASKED
        tokens = np.where(was_masked, predictions.tokens(positions), canvas.tokens[positions])
        if self._reads_confidences(sequence):
            model: Any = sequence.model()
            rows = np.searchsorted(predictions.positions, positions)
            ranks = model.confidences(predictions.scores.hidden[model.spec.num_layers][rows])
        else:
            pairs = zip(positions, tokens, strict=True)
            logits = [predictions.logits(position)[token] for position, token in pairs]
            ranks = np.array(logits, np.float64)
        num_kept = self._num_kept(canvas)
        is_kept = top_k(ranks, num_kept)
        self.finish_revision(
            sequence,
            canvas,
            predictions,
            positions[was_masked & is_kept],
            positions[~was_masked & ~is_kept],
            is_settled=num_kept >= canvas.block_masks,
        )

    def _num_kept(self, canvas: Canvas) -> int:
        """How many tokens the schedule has unmasked after this step."""
        steps = min(self.schedule.steps or canvas.block_masks, canvas.block_masks)
        base, remainder = divmod(canvas.block_masks, steps)
        finished = min(canvas.block_step + 1, steps)
        return finished * base + min(finished, remainder)


@register(
    Card(
        "remedi",
        "diffusion",
        paper="Don't Settle Too Early: Self-Reflective Remasking for Diffusion Language Models"
        " (arXiv:2509.23653)",
        exactness="lossy",
        summary="Ranks all tokens of the block in every step; masks all but the best again.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "tokens are ranked by the confidences of the second stream only where the model has one"
            " (RemeDi's checkpoints), otherwise by their logits; the released inference takes"
            " the logits always",
            "the training of that stream by reinforcement learning is left out",
            STATEFUL,
            "the mask token is never generated",
        ),
        remote={
            "steps": Range(1, 4096),
            "block": Range(0, 4096),
            "rank": RANKS,
            "cache": REVISING_WORDS,
        },
    )
)
def remedi(
    steps: int | None = None,
    block: int | None = None,
    rank: str | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> SelfReflection:
    """Denoises block by block, and ranks the tokens of the block in every step.

    Args:
        steps: Denoising steps per block (default: one per mask).
        block: Positions per block (0: the whole canvas; default: the model's own, or up to 32).
        rank: What tokens are ranked by: "confidence", for models with a second stream (RemeDi's),
            or "logit" (default: the first where the model has it).
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    return SelfReflection(steps, block, rank, cache, mask)

"""Dimple (Yu et al., "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel
Decoding", arXiv:2505.16990).

Each step unmasks every mask above a confidence threshold; if there is none, as many as a time grid
prescribes. The prompt can be computed only once, and priors can fix parts of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import WholeCanvas
from anydecode.decoders.diffusion.caches import CachePolicy, uncached_span
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy, top_k
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span


class ThresholdOrTimeGrid(UnmaskPolicy):
    """Unmasks every mask with a rank above `threshold`; if there is none, follows a time grid.

    Args:
        threshold: The bound of the rank.
        steps: The steps of the time grid (default: one per mask). Steps of the grid that would
            unmask no mask are skipped.
    """

    def __init__(self, threshold: float, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise InvalidRequestError(f"steps must be at least 1, not {steps}")
        self.threshold = threshold
        self.steps = steps

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        confident: np.ndarray = ranks > self.threshold
        return confident if confident.any() else top_k(ranks, self.quota(canvas, len(positions)))

    def quota(self, canvas: Canvas, masks: int) -> int:
        """How many of the `masks` remaining masks the time grid unmasks.

        This is a share 1 - s / r, where r is the share of the canvas that is masked, and s is the
        largest time of the grid below r that unmasks at least one.
        """
        steps = self.steps or canvas.block_masks
        r = masks / canvas.block_masks
        for step in range(1, steps):
            s = 1 - step / steps
            if s < r and int(masks * (1 - s / r) + 1e-9) >= 1:
                return int(masks * (1 - s / r) + 1e-9)
        return masks


class PromptCachePolicy(CachePolicy):
    """The prompt sees only itself and is computed once; later passes compute the rest."""

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        length = canvas.policy_state["start"] - canvas.logit_shift
        if length <= 0 or kv_cache.length >= length:
            return []
        positions = np.arange(length, dtype=np.int32)
        span = uncached_span(canvas, kv_cache, canvas.tokens, positions)
        span.visible, span.keep = np.minimum(span.visible, length), True
        return [span]

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        return uncached_span(
            canvas,
            kv_cache,
            tokens,
            canvas.input_positions(canvas.policy_state["start"], len(canvas)),
        )


class PriorDenoiser(Denoiser):
    """Fixes `priors` (offset from the prompt's end: text or tokens) before the first pass."""

    priors: Mapping[int, str | list[int]] = {}

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if self.priors:
            self.canvas_of(sequence)  # so that a wrong one is refused now

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        super().begin(sequence, canvas)
        for offset, text in self.priors.items():
            tokens = sequence.tokenizers[TARGET].encode(text) if isinstance(text, str) else text
            for position, token in enumerate(tokens, canvas.policy_state["start"] + int(offset)):
                if not canvas.policy_state["start"] <= position < len(canvas):
                    raise InvalidRequestError(
                        f"a prior has a token at offset {position - canvas.policy_state['start']},"
                        " but the canvas has"
                        f" {len(canvas) - canvas.policy_state['start']} positions"
                    )
                if canvas.tokens[position] != token:
                    if canvas.tokens[position] != canvas.mask:
                        raise InvalidRequestError(
                            "two priors have a token at offset"
                            f" {position - canvas.policy_state['start']}"
                        )
                    canvas.fix(position, int(token))


@register(
    Card(
        "dimple",
        "diffusion",
        paper="Dimple (arXiv:2505.16990)",
        exactness="lossy",
        summary="Unmasks all confident tokens, else follows a time grid; fixed structure.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        missing=("images: only the text model is run",),
        remote={
            "threshold": Range(0, 1),
            "steps": Range(1, 4096),
            "remasking": RANKING_WORDS,
            "cache": CACHE_WORDS,
        },
    )
)
def dimple(
    threshold: float = 0.95,
    steps: int | None = None,
    remasking: str = "confidence",
    prefill: bool = False,
    cache: str = "none",
    priors: Mapping[int, str | list[int]] | None = None,
    mask: int | None = None,
) -> Denoiser:
    """Denoises with a threshold, else a time grid.

    Args:
        threshold: Masks ranked above it are unmasked.
        steps: The steps of the time grid (default: one per mask).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        prefill: Compute the prompt only once, without attention to the canvas. This is exact for
            models trained in this way, and an approximation for others.
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        priors: Texts or tokens that are fixed at offsets from the prompt's end.
        mask: The mask token (default: the tokenizer's).
    """
    if prefill and cache != "none":
        raise InvalidRequestError(
            f"prefill=True is a cache of its own and needs cache=none, not cache={cache}"
        )
    decoder = PriorDenoiser(
        WholeCanvas(),
        ranking(remasking),
        ThresholdOrTimeGrid(threshold, steps),
        PromptCachePolicy() if prefill else cache_named(cache),
        mask=mask,
    )
    decoder.priors = priors or {}
    return decoder

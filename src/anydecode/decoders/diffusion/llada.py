"""The decoder of LLaDA (Nie et al., "Large Language Diffusion Models", arXiv:2502.09992).

Blocks are denoised from left to right, without a cache. Each step unmasks a fixed number of the
best-ranked masks of the block, by default the most confident ones. With guidance, a pass also
scores the canvas with a masked prompt, and the logits move away from those.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, Ranking, ranking
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import TARGET, Sequence

ENDS = ("allowed", "last", "never")


class EndsLast(Ranking):
    """Another ranking; masks whose predicted token ends the text come last."""

    def __init__(self, inner: Ranking) -> None:
        self.inner = inner

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        ranks = self.inner.rank(canvas, predictions, positions)
        ends = [*_end_tokens(predictions.sequence)]
        return np.where(np.isin(predictions.tokens(positions), ends), -np.inf, ranks)


class Llada(Denoiser):
    """Denoises with guidance, and with or without tokens that end the text."""

    guidance = 0.0
    can_end = True

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        if not self.guidance:
            yield from super().step(sequence, canvas)
            return
        prompt = range(canvas.policy_state["start"])
        masked = canvas.copy_tokens(prompt, [canvas.mask] * len(prompt))
        predictions, others = yield from self.forward(sequence, canvas, [canvas.tokens, masked])
        weight = np.float32(self.guidance)

        def guided(position: int, logits: np.ndarray) -> np.ndarray:
            result: np.ndarray = logits.copy()
            allowed = np.isfinite(logits)
            result[allowed] += weight * (logits[allowed] - others.logits(position)[allowed])
            return result

        predictions.adjust(guided)
        self.unmask_step(sequence, canvas, predictions)

    def predictions(
        self, sequence: Sequence, canvas: Canvas, scores: Scores, rows: range | None = None
    ) -> Predictions:
        predictions = super().predictions(sequence, canvas, scores, rows)
        if not self.can_end:
            predictions.scores.logits[:, [*_end_tokens(sequence)]] = -np.inf
        return predictions


def _end_tokens(sequence: Sequence) -> frozenset[int]:
    """The tokens that end a text, as the tokenizer says."""
    return frozenset(sequence.tokenizers[TARGET].eos_ids)


@register(
    Card(
        "llada",
        "diffusion",
        paper="Large Language Diffusion Models (arXiv:2502.09992)",
        exactness="lossy",
        summary="Blocks from left to right; unmasks a fixed number of confident masks per step.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the block size need not divide the canvas: the last block may be smaller",
            "steps are counted per block (the paper's number divided by the number of blocks)",
            "the mask token is never generated",
            "`end` holds for all of the model's tokens that end a text; the released code forbids"
            " one of them",
        ),
        remote={
            "block": Range(0, 4096),
            "steps": Range(1, 4096),
            "remasking": RANKING_WORDS,
            "guidance": Range(0, 100),
            "end": Words(ENDS),
            "length": Range(1, 4096),
            "cache": BLOCKWISE_WORDS,
        },
    )
)
def llada(
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "confidence",
    guidance: float = 0.0,
    end: str = "allowed",
    length: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises in blocks with a fixed number of tokens per step.

    Args:
        block: Positions per block (0: the whole canvas; default: up to 32).
        steps: Denoising steps per block (default: one per mask).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        guidance: How far the logits move away from those without the prompt: by so many times their
            difference (0: not at all; a pass then scores one canvas).
        end: Tokens that end the text are "allowed", unmasked "last", or "never" predicted.
        length: The number of masks of a canvas (default: max_tokens).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= guidance <= 1e6:
        raise InvalidRequestError(f"guidance must be 0 or more, not {guidance}")
    if guidance and cache != "none":
        raise UnsupportedCombinationError(
            f"guidance needs cache=none, not cache={cache}: cached rows would be those"
            " of the canvas with its prompt"
        )
    if end not in ENDS:
        raise InvalidRequestError(f"end={end!r} is unknown; it must be one of {', '.join(ENDS)}")
    order = ranking(remasking)
    if end == "last":
        order = EndsLast(order)
    blocks, policy = blocks_and_cache(block, cache)
    decoder = Llada(
        blocks,
        order,
        TopKUnmasking(steps),
        policy,
        mask=mask,
        length=length,
    )
    decoder.guidance, decoder.can_end = guidance, end != "never"
    return decoder

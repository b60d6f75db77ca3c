"""Adaptive parallel decoding (Israel et al., "Accelerating Diffusion LLMs via Adaptive Parallel
Decoding", arXiv:2506.00413).

The diffusion model samples the next masks from the left in parallel. A small autoregressive model
scores these tokens, and the longest prefix is kept on which samples from the diffusion model and
from the product of both distributions agree.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.diffusion.approximate_caches import RecentCachePolicy
from anydecode.decoders.diffusion.blocks import SlidingWindow
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, Sequence


class JointDenoiser(Denoiser):
    """Samples the window from the diffusion model and, with the same noise, from the product of
    both models' distributions; commits the longest prefix on which the two agree."""

    requirements = Requirements(runners=(DRAFT,), causal=False)
    weight = 0.7

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.is_stateful:
            self.unmask_step(sequence, canvas, predictions)
            return
        masks = canvas.masked(canvas.frontier, self.blocks.window_end(canvas))
        window = masks[masks - masks[0] == np.arange(len(masks))]
        predictions.keep()
        drafts = predictions.tokens(window)
        num_agreed = 1
        if len(window) > 1:
            sequence.align(DRAFT)
            committed = canvas.tokens[sequence.length : canvas.frontier].tolist()
            unscored = [*sequence.unscored(DRAFT), *committed]
            chain = [*unscored, *drafts[:-1].tolist()]
            scores = yield sequence.score(chain, runner=DRAFT, rows="all")
            rows = scores.logits[len(unscored) - 1 :]
            while num_agreed < len(window):
                position = int(window[num_agreed])
                joint = self.joint(predictions.logits(position), rows[num_agreed])
                token = sequence.sample(predictions.sampler, joint, position, predictions.step)
                if token != drafts[num_agreed]:
                    break
                num_agreed += 1
        canvas.open(canvas.frontier, self.blocks.window_end(canvas))
        self.commit(sequence, canvas, predictions, window[:num_agreed])

    def joint(self, diffusion: np.ndarray, autoregressive: np.ndarray) -> np.ndarray:
        """The logits of the product: `weight` times the diffusion model's log-probabilities plus
        1 - `weight` times the autoregressive model's, up to a constant; float32 `[vocab_size]`.
        Tokens that only one of the vocabularies has get -inf."""
        shared = min(len(diffusion), len(autoregressive))
        joint = np.full(len(diffusion), -np.inf, np.float32)
        with np.errstate(invalid="ignore"):
            joint[:shared] = (
                self.weight * diffusion[:shared] + (1 - self.weight) * autoregressive[:shared]
            )
        joint[np.isnan(joint)] = -np.inf
        return joint


@register(
    Card(
        "apd",
        "diffusion",
        paper="Accelerating Diffusion LLMs via Adaptive Parallel Decoding (arXiv:2506.00413)",
        exactness="lossy",
        summary="Commits tokens from the left as long as a small autoregressive model agrees.",
        needs=("diffusion model", "draft model"),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "both samples use the request's temperature; in the released code only the first does",
            "with constraints and other stateful samplers, one token per pass is generated",
            "without `recent`, the default, every pass computes the whole canvas",
        ),
        remote={"weight": Range(0, 1), "window": Range(1, 4096), "recent": Range(1, 4096)},
    )
)
def apd(
    weight: float = 0.7, window: int = 100, recent: int | None = None, mask: int | None = None
) -> Denoiser:
    """Denoises from the left, checked by an autoregressive draft model.

    Args:
        weight: The diffusion model's weight in the product, between 0 and 1; 1 accepts every token,
            0 only those that the autoregressive model would sample.
        window: How many masks a pass predicts.
        recent: How many of the newest tokens a pass computes again (the paper: 16); older ones are
            cached, and masks after the window are left out (default: no cache).
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= weight <= 1:
        raise InvalidRequestError(f"weight must be between 0 and 1, not {weight}")
    cache = None if recent is None else RecentCachePolicy(recent)
    decoder = JointDenoiser(SlidingWindow(window), cache=cache, mask=mask)
    decoder.weight = weight
    return decoder

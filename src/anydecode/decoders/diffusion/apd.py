"""A diffusion model says several tokens from the left, as far as a small autoregressive one agrees
(Israel et al., "Accelerating Diffusion LLMs via Adaptive Parallel Decoding", arXiv:2506.00413)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import SlidingWindow
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

DRAFT = "draft"


class JointDenoiser(Denoiser):
    """Draws the window from the diffusion model and, with the same noise, from the product of both
    models' distributions; says the longest prefix on which they agree."""

    runners = (DRAFT,)
    weight = 0.7

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.stateful:
            self.fill(sequence, canvas, predictions)
            return
        masks = canvas.masked(canvas.frontier, self.blocks.window(canvas))
        window = masks[masks - masks[0] == np.arange(len(masks))]
        predictions.keep()
        drafts = predictions.tokens(window)
        agreed = 1
        if len(window) > 1:
            sequence.align(DRAFT)
            before = canvas.tokens[sequence.length : canvas.frontier].tolist()
            fresh = [*sequence.unscored(DRAFT), *before]
            chain = [*fresh, *drafts[:-1].tolist()]
            scores = yield sequence.score(chain, runner=DRAFT, rows="all")
            rows = scores.logits[len(fresh) - 1 :]
            while agreed < len(window):
                position = int(window[agreed])
                joint = self.joint(predictions.logits(position), rows[agreed])
                drawn = sequence.sample(predictions.sampler, joint, position, predictions.step)
                if drawn != drafts[agreed]:
                    break
                agreed += 1
        canvas.open(canvas.frontier, self.blocks.window(canvas))
        self.commit(sequence, canvas, predictions, window[:agreed])

    def joint(self, diffusion: np.ndarray, autoregressive: np.ndarray) -> np.ndarray:
        """float32: `weight` log p of the one + (1 - `weight`) log p of the other, up to a constant;
        tokens that one of them lacks are left out."""
        both = min(len(diffusion), len(autoregressive))
        mixed = np.full(len(diffusion), -np.inf, np.float32)
        with np.errstate(invalid="ignore"):
            mixed[:both] = (
                self.weight * diffusion[:both] + (1 - self.weight) * autoregressive[:both]
            )
        mixed[np.isnan(mixed)] = -np.inf
        return mixed


@register(
    Card(
        "apd",
        "diffusion",
        paper="Accelerating Diffusion LLMs via Adaptive Parallel Decoding (arXiv:2506.00413)",
        exactness="lossy",
        summary="Says from the left what a small autoregressive model would have said, too.",
        needs=("diffusion model", "draft model"),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "every pass computes the whole canvas: no cache of tokens older than a window",
            "both draws use the request's temperature; the released code drops it in the second",
            "constraints and other policies with a memory go one token per pass",
        ),
    )
)
def apd(weight: float = 0.7, window: int = 100, mask: int | None = None) -> Denoiser:
    """`weight` is the diffusion model's share of the joint (1 accepts everything, 0 nothing the
    autoregressive model would not say); `window` is how many masks a pass looks at."""
    if not 0 <= weight <= 1:
        raise InvalidRequestError("the diffusion model's weight is between 0 and 1")
    made = JointDenoiser(SlidingWindow(window), mask=mask)
    made.weight = weight
    return made

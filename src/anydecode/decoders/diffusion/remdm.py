"""Remasking diffusion (Wang et al., "Remasking Discrete Diffusion Models with Inference-Time
Scaling", arXiv:2503.00307): the ancestral sampler of a masked model, in which a token is masked
again with a small probability in every step."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import STATEFUL, RevisedBlocks, RevisingDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence

#: The strategies, with their published eta; "conf" and "backward" have none.
ETAS = {"cap": 0.008, "rescale": 0.015, "conf": 0.0, "loop": 0.02, "backward": 0.0}
#: "loop": the times between which tokens are only exchanged, and the share of tokens then.
LOOP_START, LOOP_STOP, LOOP_SHARE = 0.55, 0.05, 0.9
#: The number of the coin of a position, of those with the purpose "unmask".
_COIN = 2


class Remasking(RevisingDenoiser):
    """Each step goes from time t to s. A token is masked with probability sigma; a mask takes its
    sampled token with the probability that leaves the expected share of tokens at 1 - s."""

    strategy = "cap"
    eta = ETAS["cap"]
    steps: int | None = None

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        positions = self.free_positions(canvas)
        steps = self.steps or canvas.block_masks
        finished = min(canvas.block_step, steps - 1)
        now, later = (self.share(1 - k / steps) for k in (finished, finished + 1))
        is_masked = canvas.committed[positions] == MASKED
        sigma = self.sigma(now, later, canvas.confidence[positions], is_masked)
        unmasks = np.ones(len(positions))
        if now < 1:
            unmasks = (later - (1 - sigma) * now) / (1 - now)
        noise = sequence.noise.with_purpose("unmask")
        coins = np.array(
            [noise.coin(int(position), predictions.step, _COIN) for position in positions]
        )
        self.finish_revision(
            sequence,
            canvas,
            predictions,
            positions[is_masked & (coins < unmasks)],
            positions[~is_masked & (coins < sigma)],
            is_settled=canvas.block_step + 1 >= steps,
        )

    def share(self, time: float) -> float:
        """The expected share of tokens (alpha) at a time between 1, all masks, and 0."""
        if self.strategy != "loop":
            return 1 - time
        if time >= LOOP_START:
            return LOOP_SHARE * (1 - time) / (1 - LOOP_START)
        if time >= LOOP_STOP:
            return LOOP_SHARE
        return LOOP_SHARE + (1 - LOOP_SHARE) * (1 - time / LOOP_STOP)

    def sigma(
        self, now: float, later: float, confidence: np.ndarray, is_masked: np.ndarray
    ) -> np.ndarray:
        """The probability with which each position is masked again, float64 `[positions]`.

        Args:
            now: The share of tokens before the step.
            later: The share of tokens after the step.
            confidence: The probability of each token when it was unmasked.
            is_masked: Which positions hold masks.
        """
        largest = min(1.0, (1 - later) / now) if now else 1.0
        if self.strategy == "conf":
            weights = np.where(is_masked, 0.0, np.exp(-confidence))
            result: np.ndarray = largest * weights / max(weights.sum(), 1e-300)
            return result
        if self.strategy == "cap":
            value = min(self.eta, largest)
        elif self.strategy == "rescale":
            value = self.eta * largest
        elif self.strategy == "backward":
            value = min((later - now) / now if now else 1.0, largest)
        else:
            value = min(self.eta, largest) if now == later == LOOP_SHARE else 0.0
        return np.full(len(confidence), value)


@register(
    Card(
        "remdm",
        "diffusion",
        paper="Remasking Discrete Diffusion Models with Inference-Time Scaling (arXiv:2503.00307)",
        exactness="lossy",
        summary="Ancestral sampling in which tokens are masked again with a small probability.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "time runs from 1 to 0 in equal steps over each block; the released code stops at 1e-5",
            "tokens are sampled by the request's sampler (top_p is the paper's nucleus); with"
            " strategy=conf, confidences are taken before temperature and truncation, in the"
            " released code from the nucleus",
            "with strategy=loop, a step over the border of two phases goes from the share of tokens"
            " at its one time to that at the other; the released code takes the phase of the time"
            " before the step",
            STATEFUL,
            "the mask token is never generated",
        ),
        remote={
            "strategy": Words(tuple(ETAS)),
            "eta": Range(0, 1),
            "steps": Range(1, 4096),
            "block": Range(0, 4096),
            "cache": REVISING_WORDS,
        },
    )
)
def remdm(
    strategy: str = "cap",
    eta: float | None = None,
    steps: int | None = None,
    block: int = 0,
    cache: str = "none",
    mask: int | None = None,
) -> Remasking:
    """Denoises by ancestral sampling with remasking.

    Args:
        strategy: The probability of masking a token again, of which the largest that is possible
            is s / (1 - t) in a step from time t to s. "cap": at most `eta`; "rescale": `eta` times
            the largest; "conf": the largest, shared out by low confidence; "loop": `eta` while the
            share of tokens stays at 0.9, else none; "backward": that of the reverse of a forward
            step.
        eta: See `strategy` (default: the published value).
        steps: Denoising steps per block (default: one per mask). More steps revise more.
        block: Positions per block (0: the model's blocks, or the whole canvas).
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if strategy not in ETAS:
        raise InvalidRequestError(
            f"strategy={strategy!r} is unknown; it must be one of {', '.join(ETAS)}"
        )
    if eta is not None and not 0 <= eta <= 1:
        raise InvalidRequestError(f"eta must be between 0 and 1, not {eta}")
    check_steps(steps)
    policy = cache_named(cache, REVISING_CACHES)
    decoder = Remasking(RevisedBlocks(block), cache=policy, mask=mask)
    decoder.strategy, decoder.steps = strategy, steps
    decoder.eta = ETAS[strategy] if eta is None else eta
    return decoder

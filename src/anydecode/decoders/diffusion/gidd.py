"""Generalized interpolating discrete diffusion (von Rütte et al., "Generalized Interpolating
Discrete Diffusion", arXiv:2503.04482): noise is a mixture of masks and random tokens, so that the
model also corrects tokens.

Ancestral sampling is followed by self-correction: each step replaces the one token of the block
for which the model is most confident of another one.
"""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.posteriors import (
    NoiseLevel,
    clean_distribution,
    draw,
    posterior,
)
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import (
    IS_SETTLED,
    STATEFUL,
    RevisedBlocks,
    RevisingDenoiser,
)
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: the best share of tokens that are the likeliest ones, and the number of
#: corrections since it was reached.
_BEST, _STALE = "gidd best", "gidd stale"
#: How many corrections without a better share end a block.
PATIENCE = 32
#: The time that the model reads in corrections.
CORRECTION_TIME = 0.01
#: The largest share of random tokens of a model that does not say it.
UNIFORM = 0.1


class Interpolating(RevisingDenoiser):
    """Ancestral sampling of mixed noise, then self-correction."""

    steps: int | None = None
    uniform: float | None = None
    corrections = 128
    temperature = 0.1

    def on_opened(self, canvas: Canvas) -> None:
        canvas.policy_state[_BEST], canvas.policy_state[_STALE] = -1.0, 0

    def time(self, canvas: Canvas) -> float:
        if canvas.block is None:
            return 1.0
        steps = self.steps or canvas.block_masks
        return 1 - canvas.block_step / steps if canvas.block_step < steps else CORRECTION_TIME

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        steps = self.steps or canvas.block_masks
        if canvas.block_step < steps:
            self._denoise(sequence, canvas, predictions, steps)
        else:
            self._correct(sequence, canvas, predictions, steps)

    def _denoise(
        self, sequence: Sequence, canvas: Canvas, predictions: Predictions, steps: int
    ) -> None:
        """A reverse step from the mixture at one time to that at the next."""
        positions = self.free_positions(canvas)
        size = len(predictions.logits(positions[0]))
        uniform = self._uniform(sequence)
        now, later = (
            noise_level(1 - k / steps, uniform, size)
            for k in (canvas.block_step, canvas.block_step + 1)
        )
        drawn = np.array(
            [
                draw(
                    sequence,
                    posterior(
                        int(canvas.tokens[position]),
                        clean_distribution(predictions, position),
                        now,
                        later,
                        canvas.mask,
                    ),
                    int(position),
                    predictions.step,
                )
                for position in positions
            ]
        )
        is_last = canvas.block_step + 1 == steps
        canvas.policy_state[IS_SETTLED] = is_last and not self.corrections
        was_masked = canvas.committed[positions] == MASKED
        is_masked = drawn == canvas.mask
        changed = ~was_masked & ~is_masked & (drawn != canvas.tokens[positions])
        remasked = positions[~was_masked & is_masked]
        canvas.remask(remasked)
        edited, tokens = positions[changed], drawn[changed].tolist()
        self.write(sequence, canvas, predictions, edited, tokens, canvas.edit)
        filled = was_masked & ~is_masked
        self.commit(
            sequence,
            canvas,
            predictions,
            positions[filled],
            drawn[filled].tolist(),
            remasked=remasked.tolist(),
            edited=edited.tolist(),
        )

    def _uniform(self, sequence: Sequence) -> float:
        if self.uniform is not None:
            return self.uniform
        time = sequence.model().spec.time
        return UNIFORM if time is None else time.uniform

    def _correct(
        self, sequence: Sequence, canvas: Canvas, predictions: Predictions, steps: int
    ) -> None:
        """Replace the token for which the model is most confident of another one."""
        positions = self.free_positions(canvas)
        tokens = canvas.tokens[positions]
        best = np.array([predictions.statistics(position).best for position in positions])
        agreeing = float((best == tokens).mean())
        state = canvas.policy_state
        state[_STALE] = 0 if agreeing > state[_BEST] else state[_STALE] + 1
        state[_BEST] = max(state[_BEST], agreeing)
        sampler = Sampler(self.temperature, predictions.sampler.pre_temperature)
        drawn = np.array([predictions.draw(sampler, position) for position in positions])
        rows = [sampler.distribution(predictions.logits(position)) for position in positions]
        scores = np.array(
            [math.exp(row.log_probability(token)) for row, token in zip(rows, drawn, strict=True)]
        )
        scores[drawn == tokens] = 0.0
        corrected = canvas.block_step + 1 - steps
        is_changed = bool(scores.any()) and state[_STALE] < PATIENCE
        state[IS_SETTLED] = not is_changed or corrected >= self.corrections
        chosen = [int(scores.argmax())] if is_changed else []
        edited = positions[chosen]
        self.write(sequence, canvas, predictions, edited, drawn[chosen].tolist(), canvas.edit)
        self.commit(sequence, canvas, predictions, positions[:0], [], edited=edited.tolist())


def noise_level(time: float, uniform: float, size: int) -> NoiseLevel:
    """The marginal at a time between 1 and 0.

    Args:
        time: The time; at 1 all is masks.
        uniform: The largest share of random tokens (p_u), which is reached at time 1/2.
        size: The size of the vocabulary with the mask token.
    """
    random = 2 * uniform / (1 - uniform) * (time * (1 - time)) ** 0.5
    total = 1 + random
    return NoiseLevel((1 - time) / total, time / total, random / total / (size - 1))


@register(
    Card(
        "gidd",
        "diffusion",
        paper="Generalized Interpolating Discrete Diffusion (arXiv:2503.04482)",
        exactness="lossy",
        summary="Samples with masks and random tokens as noise, then corrects single tokens.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "time runs from 1 to 0 in equal steps over each block; the released code starts at the"
            " time of the second step and ends with an additional step at 1e-4",
            "the shares of masks and random tokens are the paper's; those of the released code"
            " differ by terms of the order of 1 / vocabulary",
            "tokens are sampled by the request's sampler (min_p is the released code's filter)",
            STATEFUL,
        ),
        remote={
            "steps": Range(1, 4096),
            "uniform": Range(0, 0.9),
            "corrections": Range(0, 1024),
            "temperature": Range(0, 10),
            "block": Range(0, 4096),
            "cache": REVISING_WORDS,
        },
    )
)
def gidd(
    steps: int | None = None,
    uniform: float | None = None,
    corrections: int = 128,
    temperature: float = 0.1,
    block: int = 0,
    cache: str = "none",
    mask: int | None = None,
) -> Interpolating:
    """Denoises by ancestral sampling, and corrects the result.

    Args:
        steps: Steps of ancestral sampling per block (default: one per mask).
        uniform: The share of random tokens (p_u) that the model was trained with, below 1 (default:
            as its config says, else 0.1). With 0, sampling unmasks only.
        corrections: The largest number of tokens that are replaced in a block; fewer, if nothing
            changes, or if the share of tokens that are the likeliest ones has not grown for 32.
        temperature: The temperature at which replacements are sampled.
        block: Positions per block (0: the model's blocks, or the whole canvas).
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if uniform is not None and not 0 <= uniform < 1:
        raise InvalidRequestError(f"uniform must be 0 or more and below 1, not {uniform}")
    check_steps(steps)
    if corrections < 0 or temperature < 0:
        raise InvalidRequestError(
            "corrections and temperature must be 0 or more, not"
            f" corrections={corrections}, temperature={temperature}"
        )
    policy = cache_named(cache, REVISING_CACHES)
    decoder = Interpolating(RevisedBlocks(block), cache=policy, mask=mask)
    decoder.steps, decoder.uniform = steps, uniform
    decoder.corrections, decoder.temperature = corrections, temperature
    return decoder

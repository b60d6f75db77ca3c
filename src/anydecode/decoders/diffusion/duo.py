"""Duo (Sahoo et al., "The Diffusion Duality", arXiv:2506.10892) and its psi-samplers: ancestral
sampling of uniform-state diffusion, in which each step draws every position from the posterior of
what it holds and what the model predicts."""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.posteriors import NoiseLevel, draw, posterior
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.uniform import STATEFUL, UniformDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence

#: The last time of a schedule with a step that reads out the text (LFM2).
_EPS = 1e-3


class Duo(UniformDenoiser):
    """Samples from `kappa` times the posterior plus 1 - `kappa` times fresh noise around a sample
    of the posterior at time 0."""

    kappa = 1.0
    rho = 1.0
    read_out = False
    read_out_sigma = 0.0
    #: Of the first and of the last sampling step; None: that of the request.
    temperatures: tuple[float, float] | None = None

    def time(self, canvas: Canvas) -> float:
        """The time at which the model reads the block: that of the step, but in the step that reads
        out the text one of at least `read_out_sigma` noise."""
        return (1 - self._read_share(canvas)) / (1 - self._eps)

    @property
    def _eps(self) -> float:
        return _EPS if self.read_out else 0.0

    def _read_share(self, canvas: Canvas) -> float:
        """The share of tokens that are not noise, as this step assumes."""
        step = 0 if canvas.block is None else canvas.block_step
        share = self._share(canvas, step)
        is_reading = self.read_out and step + 1 >= self.num_steps(canvas)
        return min(share, math.exp(-self.read_out_sigma)) if is_reading else share

    def _share(self, canvas: Canvas, step: int) -> float:
        """The share of tokens that are not noise before a step; after the last one, 1."""
        last = self.num_steps(canvas) - self.read_out
        if step > last:
            return 1.0
        time: float = self._eps + (1 - self._eps) * (1 - step / max(1, last)) ** self.rho
        return 1 - (1 - self._eps) * time

    def _sampler(self, canvas: Canvas, predictions: Predictions) -> Sampler:
        """The sampler of the model's predictions in this step."""
        if self.temperatures is None:
            return predictions.sampler
        first, last = self.temperatures
        progress = canvas.block_step / max(1, self.num_steps(canvas) - 1 - self.read_out)
        temperature = first + min(1.0, progress) * (last - first)
        return Sampler(temperature, predictions.sampler.pre_temperature)

    def denoise(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        is_last: bool,
    ) -> tuple[np.ndarray, bool]:
        spec = sequence.model().spec
        size = spec.num_noise_tokens or len(predictions.logits(positions[0]))
        mask = canvas.mask if canvas.mask < size else -1
        num_tokens = size - (mask >= 0)
        shares = self._read_share(canvas), self._share(canvas, canvas.block_step + 1)
        now, later = (NoiseLevel(share, 0.0, (1 - share) / num_tokens) for share in shares)
        sampler = self._sampler(canvas, predictions)
        clean = [
            sampler.distribution(predictions.logits(position)[:size]).dense(size)
            for position in positions
        ]
        self.predicted(sequence, canvas, positions, clean)
        tokens = [
            draw(
                sequence,
                self._distribution(int(canvas.tokens[position]), row, now, later, mask),
                int(position),
                predictions.step,
            )
            for position, row in zip(positions, clean, strict=True)
        ]
        return np.array(tokens), is_last

    def _distribution(
        self, held: int, clean: np.ndarray, now: NoiseLevel, later: NoiseLevel, mask: int
    ) -> np.ndarray:
        ancestral = posterior(held, clean, now, later, mask)
        if self.kappa == 1:
            return ancestral
        first = posterior(held, clean, now, NoiseLevel(1.0, 0.0, 0.0), mask)
        renoised = later.share * first + later.vector(len(clean), mask)
        return self.kappa * ancestral + (1 - self.kappa) * renoised


@register(
    Card(
        "duo",
        "diffusion",
        paper="The Diffusion Duality (arXiv:2506.10892)",
        exactness="lossy",
        summary="Ancestral sampling for models whose noise is random tokens.",
        needs=("uniform-state diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "time runs from 1 to 0 over each block, or to 0.001 with read_out; the released code"
            " stops at 1e-5, and at time 1 one of 1000 tokens is not noise",
            "kappa is constant over time",
            "discrete consistency distillation (train distil --method duo) does not average the"
            " weights over the training; of models that read the time it trains an adapter",
            STATEFUL,
        ),
        remote={
            "steps": Range(1, 4096),
            "kappa": Range(0, 1),
            "rho": Range(0.01, 10),
            "read_out_sigma": Range(0, 100),
            "first_temperature": Range(0, 10),
            "last_temperature": Range(0, 10),
            "block": Range(0, 4096),
            "cache": REVISING_WORDS,
        },
    )
)
def duo(
    steps: int | None = None,
    kappa: float = 1.0,
    rho: float = 1.0,
    read_out: bool = False,
    read_out_sigma: float = 0.0,
    first_temperature: float | None = None,
    last_temperature: float | None = None,
    block: int = 0,
    cache: str = "none",
    mask: int | None = None,
) -> Duo:
    """Denoises random tokens by ancestral sampling.

    Args:
        steps: Steps per block (default: one per position).
        kappa: 1: ancestral sampling. Below 1, positions are with this probability drawn from the
            posterior, else their token is predicted and covered with fresh noise (the psi-sampler).
        rho: The time after a share u of the steps is (1 - u) to this power: below 1, more steps are
            taken where little is noise.
        read_out: Whether the last step draws the text from what is not noise after the others,
            which end at time 0.001. It is one of `steps`.
        read_out_sigma: The least noise that this step assumes, as -log of the share of tokens that
            are not noise.
        first_temperature: The temperature in the first step of a block, in place of the request's.
        last_temperature: That of the last step before the text is read out, and of this step; it
            changes evenly.
        block: Positions per block (0: the model's blocks, or the whole canvas).
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: A token that is neither noise nor predicted (default: the tokenizer's mask token).
    """
    if not 0 <= kappa <= 1:
        raise InvalidRequestError(f"kappa must be between 0 and 1, not {kappa}")
    if (first_temperature is None) != (last_temperature is None):
        raise InvalidRequestError("first_temperature and last_temperature go together")
    if min(first_temperature or 0.0, last_temperature or 0.0) < 0:
        raise InvalidRequestError(
            "first_temperature and last_temperature must be 0 or more, not"
            f" {first_temperature} and {last_temperature}"
        )
    if rho <= 0:
        raise InvalidRequestError(f"rho must be greater than 0, not {rho}")
    if read_out_sigma < 0:
        raise InvalidRequestError(f"read_out_sigma must be 0 or more, not {read_out_sigma}")
    if read_out_sigma and not read_out:
        raise InvalidRequestError("read_out_sigma needs read_out=true")
    check_steps(steps)
    decoder = Duo(FixedBlocks(block), cache=cache_named(cache, REVISING_CACHES), mask=mask)
    decoder.steps, decoder.kappa, decoder.rho = steps, kappa, rho
    decoder.read_out, decoder.read_out_sigma = read_out, read_out_sigma
    if first_temperature is not None and last_temperature is not None:
        decoder.temperatures = first_temperature, last_temperature
    return decoder

"""Discrete consistency distillation (see `consistency.py`) of models that read the noise which they
are decoded with: the time of the diffusion, masks mixed with random tokens, blocks of noise behind
clean text, and what the last pass predicted.

A trajectory is a text at all times: a position holds its token up to a time of its own, and noise
after it. For random tokens alone this is the trajectory of `consistency.trajectories`: Gaussian
noise keeps a token while the largest number of the others is not larger, which depends on one
number per position, and what takes its place does not change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from anydecode.decoders.diffusion.gidd import noise_level
from anydecode.decoders.diffusion.posteriors import NoiseLevel
from anydecode.models.spec import ModelSpec
from anydecode.training.consistency import LOG_RATIOS, divergence
from anydecode.training.network_model import NetworkModel
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import SpecialTokens

#: Points of the integral over a normal variable, and its limits in standard deviations.
_POINTS, _LIMIT = 4001, 9.0
#: The share of steps in which the model reads what it predicted in a pass before, if it can.
CONDITIONED = 0.5


class NoiseTime(NamedTuple):
    """A time of the training: the marginal of a position, and what the model's embedding of times
    receives (None: it has none)."""

    level: NoiseLevel
    value: float | None


def noise_time(spec: ModelSpec, time: float, size: int) -> NoiseTime:
    """The noise at a time from 0 to 1.

    Args:
        spec: The architecture.
        time: The time: of models that read it (GIDD) their own. Of all others, the share of tokens
            that are no noise is that of Gaussian noise at this time.
        size: The number of tokens that may be noise, the mask token left out.
    """
    reads = spec.time
    if reads is not None and not reads.reads_noise:
        return NoiseTime(noise_level(time, reads.uniform, size + 1), reads.value(time))
    share = gaussian_share(time, size)
    value = None if reads is None else -math.log(max(share, reads.margin))
    return NoiseTime(NoiseLevel(share, 0.0, (1 - share) / size), value)


def gaussian_share(time: float, size: int) -> float:
    """The share of tokens that are no noise where noise of `trajectories` at `time` is added to
    vectors of `size` numbers: a token that is not kept may also be drawn again."""
    low, high = LOG_RATIOS
    # Signal and noise have the variances sigmoid(-ratio) and sigmoid(ratio).
    strength = math.exp(-(low + time * (high - low)) / 2)
    z = torch.linspace(-_LIMIT, _LIMIT, _POINTS, dtype=torch.float64)
    density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    largest = torch.exp((size - 1) * torch.special.log_ndtr(z + strength))
    kept = float(torch.trapezoid(density * largest, z))
    return max(0.0, (kept * size - 1) / (size - 1))


def noised_texts(
    tokens: torch.Tensor,
    size: int,
    times: tuple[NoiseTime, NoiseTime],
    generator: torch.Generator,
    special: SpecialTokens,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts at two times of one trajectory.

    Args:
        tokens: The clean texts, `[batch, length]`.
        size: See `noise_time`; noise has the first tokens, the mask token left out.
        times: The two times.
        generator: Draws the noise.
        special: The special tokens.

    Returns:
        Two tensors like `tokens`.
    """
    moment, kind = torch.rand(2, *tokens.shape, generator=generator, dtype=torch.float64)
    noise = torch.randint(size, tokens.shape, generator=generator)
    if special.mask >= 0:
        noise = noise + (noise >= special.mask)
    texts = []
    for level, _ in times:
        is_mask = kind * (1 - level.share) < level.mask
        held = torch.where(is_mask, special.mask, noise)
        texts.append(torch.where(moment < level.share, tokens, held))
    return texts[0], texts[1]


def noised_consistency(
    student: NetworkModel,
    teacher: NetworkModel,
    tokens: torch.Tensor,
    start: int,
    apart: float,
    generator: torch.Generator,
    special: SpecialTokens,
) -> torch.Tensor:
    """The mean divergence KL(student || teacher) over the positions behind the prompts; arguments
    as those of `consistency`. Each text has times of its own, and a pass of its own, since a pass
    has one time."""
    spec, total = student.spec, torch.zeros(())
    size = spec.num_noise_tokens or spec.vocab_size
    size -= 0 <= special.mask < size
    for text in tokens.unsqueeze(1):
        later = min(1.0, float(torch.rand((), generator=generator)) + apart)
        is_conditioned = float(torch.rand((), generator=generator)) < CONDITIONED
        times = noise_time(spec, later, size), noise_time(spec, later - apart, size)
        texts = noised_texts(text[:, start:], size, times, generator, special)

        is_conditioned = is_conditioned and spec.has_canvas
        with torch.no_grad():
            expected = _predicted(teacher, text, texts[1], times[1], special, is_conditioned)
        found = _predicted(student, text, texts[0], times[0], special, is_conditioned)
        total = total + divergence(found, expected)
    return total / len(tokens)


def _predicted(
    model: NetworkModel,
    tokens: torch.Tensor,
    noised: torch.Tensor,
    time: NoiseTime,
    special: SpecialTokens,
    is_conditioned: bool,
) -> torch.Tensor:
    """The log-probabilities of a noised canvas, `[batch, canvas, vocab]`; `is_conditioned`: it is
    read with the predictions of a pass before."""
    expected = None
    if is_conditioned:
        with torch.no_grad():
            first = model.denoised(tokens, noised, time.value)
            expected = model.expected(without_mask(first, special))
    logits = model.denoised(tokens, noised, time.value, expected)
    return without_mask(logits, special).log_softmax(-1)

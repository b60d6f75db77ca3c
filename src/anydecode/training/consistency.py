"""Discrete consistency distillation (Sahoo et al., "The Diffusion Duality", arXiv:2506.10892,
algorithm 1): the student learns to predict from a noisier text what the teacher predicts from a
less noisy one of the same trajectory, so that it needs fewer steps.

A trajectory adds Gaussian noise, the same at all times, to the one-hot vectors of a text; the text
at a time is the largest number of each vector. The teacher is the student of the round before, and
the distance of the two times doubles with each round.
"""

from __future__ import annotations

import torch
from torch import nn

from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import OWN_TOKENS, SpecialTokens

#: Rounds of a training, and the number of parts of the time; the distance is one in the first
#: round.
ROUNDS, TIMES = 5, 512
#: The log of the ratio of variances of noise and text, at time 0 and at time 1.
LOG_RATIOS = (-4.0, -1.0)


def distance(round: int) -> float:
    """The distance of the student's time from the teacher's in a round, counted from 0."""
    return float(2**round / TIMES)


def trajectories(
    tokens: torch.Tensor,
    vocab: int,
    times: tuple[torch.Tensor, torch.Tensor],
    generator: torch.Generator,
    special: SpecialTokens = OWN_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts at two times of one trajectory each.

    Args:
        tokens: The clean texts, `[batch, length]`.
        vocab: The size of the vocabulary.
        times: Two times from 0 to 1 of each text, `[batch]`.
        generator: Draws the noise.
        special: The special tokens; those that are never predicted are no noise either.

    Returns:
        Two tensors like `tokens`.
    """
    noise = torch.randn(*tokens.shape, vocab, generator=generator)
    noise = without_mask(noise, special)
    low, high = LOG_RATIOS
    texts = []
    for time in times:
        ratio = (low + time * (high - low))[:, None]
        vectors = torch.sigmoid(ratio).sqrt()[..., None] * noise
        share = torch.sigmoid(-ratio).sqrt().expand(tokens.shape)[..., None]
        texts.append(vectors.scatter_add(-1, tokens[..., None], share).argmax(-1))
    return texts[0], texts[1]


def consistency(
    student: nn.Module,
    teacher: nn.Module,
    tokens: torch.Tensor,
    start: int,
    vocab: int,
    apart: float,
    generator: torch.Generator,
    special: SpecialTokens = OWN_TOKENS,
) -> torch.Tensor:
    """The mean divergence KL(student || teacher) over the positions behind the prompts.

    Args:
        student: Reads the text at the later time.
        teacher: Reads the text at the earlier one; it is not trained.
        tokens: Prompts of one length with their answers, `[batch, length]`.
        start: The length of the prompts, which get no noise.
        vocab: The size of the vocabulary.
        apart: The distance of the two times.
        generator: Draws times and noise.
        special: The model's special tokens.
    """
    later = (torch.rand(len(tokens), generator=generator) + apart).clamp(max=1.0)
    answers, prompts = tokens[:, start:], tokens[:, :start]
    noisier, cleaner = trajectories(answers, vocab, (later, later - apart), generator, special)

    def predicted(model: nn.Module, noised: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(torch.cat([prompts, noised], 1))[:, start:]
        return without_mask(logits, special).log_softmax(-1)

    with torch.no_grad():
        expected = predicted(teacher, cleaner)
    return divergence(predicted(student, noisier), expected)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The mean of KL(p || q) over rows, in nats, from log-probabilities `[..., vocab]`; tokens that
    neither allows may be -inf."""
    return (p.exp() * (p - q).nan_to_num(0.0)).sum(-1).mean()

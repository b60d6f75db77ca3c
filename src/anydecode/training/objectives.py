"""The losses of the two training stages: next-token prediction, then masked diffusion.

The diffusion loss is LLaDA's (Nie et al., arXiv:2502.09992) without its 1/t weight, that is, the
mean over masked tokens, which trains better at this size. Its variance is reduced by mask rates
spread evenly over a batch, and by using each example twice with complementary masks.

With random tokens as noise (uniform-state diffusion; Sahoo et al., Duo, arXiv:2506.10892), random
tokens take the place of masks, and the loss is the mean over all tokens of the answer, since the
model is not told which of them are noise. The time is no input, and no weight of the loss.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from anydecode.training.data import Batch
from anydecode.training.network_model import NetworkModel
from anydecode.training.tokenizer import MASK_ID, OWN_TOKENS, SpecialTokens
from anydecode.training.transformer import Transformer, stream_mask

#: The kinds of noise of the diffusion stage.
NOISES = ("mask", "uniform")
MIN_RATE = 1e-3
#: Fraction of a batch that is masked as in semi-autoregressive decoding.
BLOCK_FRACTION = 0.25


def causal_loss(model: Transformer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed weighted loss of the next tokens, and the sum of the weights."""
    targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    logits = model(batch.tokens[:, :-1], causal=True, output_rows=weights > 0)
    return _weighted(logits, targets[weights > 0], weights[weights > 0])


def diffusion_loss(
    model: Transformer, batch: Batch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed weighted loss of the masked tokens, and the sum of their weights."""
    first, second = complementary_masks(batch.weights > 0, generator)
    tokens, weights = batch.tokens.repeat(2, 1), batch.weights.repeat(2, 1)
    masked = torch.cat([first, second])
    logits = model(tokens.masked_fill(masked, MASK_ID), output_rows=masked)
    return _weighted(logits, tokens[masked], weights[masked])


def uniform_loss(
    model: Transformer, batch: Batch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed weighted loss of all tokens of the answers, given random tokens in some of their
    places, and the sum of their weights."""
    answer = batch.weights > 0
    noised = torch.cat(complementary_masks(answer, generator))
    tokens, weights = batch.tokens.repeat(2, 1), batch.weights.repeat(2, 1)
    noise = random_tokens(tokens.shape, model.shape.vocab, generator)
    logits = model(torch.where(noised, noise, tokens), output_rows=weights > 0)
    return _weighted(logits, tokens[weights > 0], weights[weights > 0])


def random_tokens(
    size: torch.Size | tuple[int, ...], vocab: int, generator: torch.Generator
) -> torch.Tensor:
    """Uniform tokens other than the mask token."""
    drawn = torch.randint(vocab - 1, size, generator=generator)
    return drawn + (drawn >= MASK_ID)


def complementary_masks(
    answer: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two masks over `answer[batch, length]` that are disjoint and together cover it. Rows masked
    block by block are an exception: there the positions after the block are masked in both, and
    those before it in neither."""
    count, length = answer.shape
    rates = (torch.rand(1, generator=generator) + torch.arange(count) / count) % 1.0
    rates = rates[torch.randperm(count, generator=generator)].clamp(MIN_RATE, 1 - MIN_RATE)
    first = torch.rand(count, length, generator=generator) < rates[:, None]
    positions = torch.arange(length)
    starts, ends = (
        torch.randint(0, length + 1, (2, count, 1), generator=generator).sort(dim=0).values
    )
    by_block = torch.rand(count, 1, generator=generator) < BLOCK_FRACTION
    is_shown, is_hidden = by_block & (positions < starts), by_block & (positions >= ends)
    candidates = answer & ~is_shown
    return candidates & (first | is_hidden), candidates & (~first | is_hidden)


def without_mask(logits: torch.Tensor, special: SpecialTokens = OWN_TOKENS) -> torch.Tensor:
    """Logits with -inf for the mask and padding tokens."""
    forbidden = torch.zeros(logits.shape[-1])
    forbidden[list(special.barred)] = float("-inf")
    return logits + forbidden.to(logits)


def masked_logits(
    model: Transformer | NetworkModel,
    tokens: torch.Tensor,
    masked: torch.Tensor,
    special: SpecialTokens = OWN_TOKENS,
    predicted: torch.Tensor | None = None,
    prompt: int = 0,
) -> torch.Tensor:
    """The logits of masked positions, `[selected, vocab]`, with -inf for tokens that are never
    predicted.

    In a model with blocks, each block is predicted after the clean text of the blocks before it,
    as it is when they are finished.

    Args:
        model: The model.
        tokens: The clean texts, `[batch, length]`.
        masked: bool `[batch, length]`: the positions to mask; not the first one of a text.
        special: The model's special tokens.
        predicted: bool `[batch, length]`: the positions whose logits are returned, row by row
            (default: all masked ones).
        prompt: The length of the prompts.
    """
    shift, size = model.shape.logit_shift, model.shape.block_size
    row, column = (masked if predicted is None else predicted).nonzero(as_tuple=True)
    noised = tokens.masked_fill(masked, special.mask)
    if size is None:
        return without_mask(model(noised, output_rows=(row, column - shift)), special)
    shape = model.shape
    length, origin = tokens.shape[1], shape.block_origin(prompt)
    positions = torch.arange(length).repeat(2)
    streams = torch.arange(2).repeat_interleave(length)
    visible = stream_mask(streams, positions, size, origin, shape.has_causal_context)
    if shape.is_ordered:
        # Of the clean stream the order is that of the positions, in which masks come last.
        order = positions + torch.cat([torch.zeros_like(masked), masked], 1) * length
        visible = visible & (order[:, :, None] >= order[:, None, :])
    # With shifted logits the clean text before a block predicts its first position.
    is_first = (column - origin) % size == 0
    is_clean = is_first & (bool(shift) or shape.context_predicts_next)
    logits = model(
        torch.cat([tokens, noised], 1),
        output_rows=(row, torch.where(is_clean, column - 1, column - shift + length)),
        positions=positions,
        visible=visible,
    )
    return without_mask(logits, special)


def _weighted(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = functional.cross_entropy(without_mask(logits), targets, reduction="none")
    return (losses * weights).sum(), weights.sum()

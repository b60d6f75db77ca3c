"""Batched decoding in torch, without the engine, for evaluation during training."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
import torch
from torch.nn import functional

from anydecode.tasks.tasks import Example
from anydecode.training.objectives import random_tokens, without_mask
from anydecode.training.tokenizer import EOS_ID, OWN_TOKENS, SpecialTokens
from anydecode.training.transformer import Transformer, block_of


@torch.inference_mode()
def denoise(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    canvas: int,
    threshold: float,
    special: SpecialTokens = OWN_TOKENS,
) -> tuple[list[list[int]], float]:
    """Denoise the answers to `prompts`, each on a canvas of `canvas` masks, or in the blocks of a
    model that has blocks.

    Every pass commits the tokens with probability of at least `threshold`, and always the most
    probable one (Wu et al., Fast-dLLM, arXiv:2505.22618): above 1 that is one token per pass, at 0
    all in one pass.

    Returns:
        The answers' tokens, and the mean number of passes per answer.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    passes = 0
    for positions in by_length(prompts):
        head = torch.tensor([prompts[position] for position in positions])
        start = head.shape[1]
        size = model.shape.block_size or start + canvas
        origin = model.shape.block_origin(start)
        width = origin + -(-(start + canvas - origin) // size) * size
        tokens = functional.pad(head, (0, width - start), value=special.mask)
        first = start - (start - origin) % size
        for end in range(first + size, width + 1, size):
            seen = tokens[:, :end]
            begin, rows = end - size, torch.arange(end)
            blocks = block_of(rows, size, origin)
            visible = blocks[:, None] >= blocks if model.shape.block_size else None
            if model.shape.has_causal_context:
                visible = (rows[:, None] >= rows) | ((rows >= begin)[:, None] & (rows >= begin))
            if model.shape.context_predicts_next:
                passes += len(seen)
                logits = model(seen[:, :begin], causal=True)[:, -1]
                seen[:, begin] = without_mask(logits, special).argmax(-1)
            while (masked := seen == special.mask).any():
                passes += int(masked.any(-1).sum())
                logits = model(seen, visible=visible).roll(model.shape.logit_shift, 1)
                logits = without_mask(logits, special)
                confidence, predictions = logits.softmax(-1).max(-1)
                confidence = confidence.masked_fill(~masked, -1.0)
                most_confident = torch.zeros_like(masked).scatter_(
                    1, confidence.argmax(-1, keepdim=True), True
                )
                chosen = masked & (most_confident | (confidence >= threshold))
                seen[chosen] = predictions[chosen]
        answered = tokens[:, start : start + canvas]
        for position, row in zip(positions, answered.tolist(), strict=True):
            answers[position] = row
    return answers, passes / max(1, len(prompts))


@torch.inference_mode()
def denoise_uniform(
    model: Transformer, prompts: Sequence[Sequence[int]], canvas: int, steps: int, seed: int = 0
) -> list[list[int]]:
    """The answers to `prompts`, each on a canvas of `canvas` random tokens, in `steps` passes.

    Each pass takes the most probable tokens, and covers a share of them, which falls to 0 with the
    passes, with random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    answers: list[list[int]] = [[] for _ in prompts]
    for positions in by_length(prompts):
        head = torch.tensor([prompts[position] for position in positions])
        size = (len(positions), canvas)
        tokens = random_tokens(size, model.shape.vocab, generator)
        for step in range(1, steps + 1):
            logits = without_mask(model(torch.cat([head, tokens], 1)))
            predicted = logits[:, head.shape[1] :].argmax(-1)
            is_noise = torch.rand(size, generator=generator) < 1 - step / steps
            noise = random_tokens(size, model.shape.vocab, generator)
            tokens = torch.where(is_noise, noise, predicted)
        for position, row in zip(positions, tokens.tolist(), strict=True):
            answers[position] = row
    return answers


def by_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The indices of prompts grouped by length, so that each group is one batch."""
    groups: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(position)
    return list(groups.values())


@torch.inference_mode()
def continue_greedily(
    model: Transformer, prompts: Sequence[Sequence[int]], limit: int
) -> list[list[int]]:
    """Greedy continuations of the causal model, up to EOS or `limit` tokens."""
    answers: list[list[int]] = [[] for _ in prompts]
    for positions in by_length(prompts):
        tokens = torch.tensor([prompts[position] for position in positions])
        start, ended = tokens.shape[1], torch.zeros(len(positions), dtype=torch.bool)
        while tokens.shape[1] < start + limit and not ended.all():
            predictions = without_mask(model(tokens, causal=True)[:, -1]).argmax(-1)
            tokens = torch.cat([tokens, predictions[:, None]], dim=1)
            ended |= predictions == EOS_ID
        for position, row in zip(positions, tokens[:, start:].tolist(), strict=True):
            answers[position] = row[: row.index(EOS_ID) + 1] if EOS_ID in row else row
    return answers


def accuracy(
    examples: Sequence[Example], answers: Sequence[list[int]], tokenizer: tokenizers.Tokenizer
) -> float:
    """The fraction of `answers` that are right, each read up to its first EOS."""
    num_right = 0
    for example, answer in zip(examples, answers, strict=True):
        end = answer.index(EOS_ID) if EOS_ID in answer else len(answer)
        num_right += example.is_right(tokenizer.decode(answer[:end]))
    return num_right / max(1, len(examples))

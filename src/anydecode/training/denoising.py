"""Decoding as the trainer needs it to look at its own progress: batched, in torch, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
import torch
from torch.nn import functional

from anydecode.evaluation.parallelbench.tasks import Example
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import EOS_ID, MASK_ID
from anydecode.training.transformer import Transformer


@torch.inference_mode()
def denoise(
    model: Transformer, prompts: Sequence[Sequence[int]], canvas: int, threshold: float
) -> tuple[list[list[int]], float]:
    """The answers to `prompts` on a canvas of so many masks, and the passes an answer took.

    Every pass commits the tokens above `threshold`, the likeliest one in any case (Wu et al.,
    Fast-dLLM, arXiv:2505.22618): above 1 that is one token a pass, at 0 all in one.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    passes = 0
    for positions in by_length(prompts):
        head = torch.tensor([prompts[position] for position in positions])
        tokens = functional.pad(head, (0, canvas), value=MASK_ID)
        while (masked := tokens == MASK_ID).any():
            passes += int(masked.any(-1).sum())
            sure, picks = without_mask(model(tokens)).softmax(-1).max(-1)
            sure = sure.masked_fill(~masked, -1.0)
            best = torch.zeros_like(masked).scatter_(1, sure.argmax(-1, keepdim=True), True)
            tokens = torch.where(masked & (best | (sure >= threshold)), picks, tokens)
        for position, row in zip(positions, tokens[:, head.shape[1] :].tolist(), strict=True):
            answers[position] = row
    return answers, passes / max(1, len(prompts))


def by_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The indices of prompts that are equally long, so that they go through the model together."""
    groups: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(position)
    return list(groups.values())


@torch.inference_mode()
def continue_greedily(
    model: Transformer, prompts: Sequence[Sequence[int]], limit: int
) -> list[list[int]]:
    """The likeliest next tokens of the causal model, up to EOS or `limit`."""
    answers: list[list[int]] = [[] for _ in prompts]
    for positions in by_length(prompts):
        tokens = torch.tensor([prompts[position] for position in positions])
        start, ended = tokens.shape[1], torch.zeros(len(positions), dtype=torch.bool)
        while tokens.shape[1] < start + limit and not ended.all():
            picks = without_mask(model(tokens, causal=True)[:, -1]).argmax(-1)
            tokens = torch.cat([tokens, picks[:, None]], dim=1)
            ended |= picks == EOS_ID
        for position, row in zip(positions, tokens[:, start:].tolist(), strict=True):
            answers[position] = row[: row.index(EOS_ID) + 1] if EOS_ID in row else row
    return answers


def accuracy(
    examples: Sequence[Example], answers: Sequence[list[int]], tokenizer: tokenizers.Tokenizer
) -> float:
    """The share of `answers` that are right, each read up to its first EOS."""
    right = 0
    for example, answer in zip(examples, answers, strict=True):
        end = answer.index(EOS_ID) if EOS_ID in answer else len(answer)
        right += example.is_right(tokenizer.decode(answer[:end]))
    return right / max(1, len(examples))

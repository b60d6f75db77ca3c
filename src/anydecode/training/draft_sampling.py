"""Texts that a model in training samples itself, with a key-value cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer


@torch.no_grad()
def sample_answers(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Collection[int],
    generator: torch.Generator,
) -> list[list[int]]:
    """An answer to each prompt, sampled at temperature 1.

    Args:
        model: The model.
        prompts: Tokens of each, at least one; with the answer no more than the model has positions.
        tokens: Maximum number of tokens of an answer.
        ends: The tokens with which an answer ends; they belong to it.
        generator: For the samples.
    """
    texts, _ = padded([([*prompt], []) for prompt in prompts])
    count, longest = texts.shape
    shape, total = model.shape, longest + tokens
    heads = shape.kv_heads or shape.heads
    caches = [torch.zeros(2, count, heads, total, shape.head_width) for _ in model.blocks]
    x = model.transformer["wte"](texts)
    rope = model.cos[:longest], model.sin[:longest]
    for block, cache in zip(model.blocks, caches, strict=True):
        q, k, v = block.heads(x, rope)
        cache[0, :, :, :longest], cache[1, :, :, :longest] = k, v
        x = block.mix(x, q, k, v, True, None)
        x = x + block.mlp(x)
    rows, positions = torch.arange(count), torch.tensor([len(prompt) for prompt in prompts])
    x = x[rows, positions - 1]
    answers: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * count
    while True:
        logits = model.head(model.transformer["ln_f"](x))
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        for row, token in enumerate(chosen.tolist()):
            if is_open[row]:
                answers[row].append(token)
                is_open[row] = token not in ends and len(answers[row]) < tokens
        if not any(is_open):
            return answers
        x = model.transformer["wte"](chosen[:, None])
        rope = model.cos[positions][:, None, None], model.sin[positions][:, None, None]
        visible = torch.arange(total) <= positions[:, None, None, None]
        for block, cache in zip(model.blocks, caches, strict=True):
            q, k, v = block.heads(x, rope)
            cache[0, rows, :, positions], cache[1, rows, :, positions] = k[:, :, 0], v[:, :, 0]
            x = block.mix(x, q, cache[0], cache[1], False, visible)
            x = x + block.mlp(x)
        x, positions = x[:, 0], positions + 1
